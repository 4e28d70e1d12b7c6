// Micro-batches that carry one sample between them (chains): what returns when, and what they need together.
//
// Twin: schedules/search/dispatch.py, and of `ChainNeeds` `_of_chains` in schedules/search/dispatch.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace dynapipe {

using i64 = std::int64_t;
constexpr i64 kNever = i64{1} << 60;

// A micro-batch's costs on a stage. Transfer is to or from the next stage.
enum Field { kForward, kGradient, kWeight, kStored, kWorking, kTransfer, kFields };

// The order in which gradients run on every stage, by position in the injection order.
struct Returns {
  std::vector<int> order, place;   // positions as their gradients run on every stage; each position's place there
  std::vector<int> first, last;    // of the chain of each position; itself where it is whole
  int longest = 1;                 // pieces of a chain
  bool empty = true;               // no chains: the rest is not filled, and returns are in injection order

  // `chain_of` [position]: the number of its chain, or -1; pieces stand in order.
  void set(const std::vector<int>& chain_of) {
    const int count = static_cast<int>(chain_of.size());
    longest = 1;
    empty = std::all_of(chain_of.begin(), chain_of.end(), [](int chain) { return chain < 0; });
    if (empty) return;
    const int chains = 1 + *std::max_element(chain_of.begin(), chain_of.end());
    std::vector<int> begins(chains, -1), ends(chains, -1), pieces(chains, 0);
    for (int m = 0; m < count; ++m) {
      const int chain = chain_of[m];
      if (chain < 0) continue;
      if (begins[chain] < 0) begins[chain] = m;
      ends[chain] = m;
      longest = std::max(longest, ++pieces[chain]);
    }
    first.resize(count);
    last.resize(count);
    place.resize(count);
    order.clear();
    for (int m = 0; m < count; ++m) {
      first[m] = chain_of[m] < 0 ? m : begins[chain_of[m]];
      last[m] = chain_of[m] < 0 ? m : ends[chain_of[m]];
    }
    for (int m = 0; m < count; ++m) {
      if (last[m] != m) continue;
      for (int q = m; q >= first[m]; --q) {
        if (last[q] == m) order.push_back(q);
      }
    }
    for (int k = 0; k < count; ++k) place[order[k]] = k;
  }
};

// What the forward of each position takes for good, and the working bytes to be ready for while it is inside: a chain
// takes all at its first piece, and any of its pieces may run.
struct ChainNeeds {
  std::vector<i64> taken, ready;  // [position][stage]

  void set(int stages, const i64* const* records, const Returns& returns) {
    const int count = static_cast<int>(returns.order.size());
    taken.resize(static_cast<std::size_t>(count) * stages);
    ready.resize(taken.size());
    for (int m = 0; m < count; ++m) {
      const int first = returns.first[m];
      for (int s = 0; s < stages; ++s) {
        const i64 stored = records[m][s * kFields + kStored], working = records[m][s * kFields + kWorking];
        taken[m * stages + s] = 0;
        taken[first * stages + s] += stored;
        ready[m * stages + s] = working;
        ready[first * stages + s] = std::max(ready[first * stages + s], working);
      }
    }
    for (int m = 0; m < count; ++m) {
      for (int s = 0; s < stages; ++s) ready[m * stages + s] = ready[returns.first[m] * stages + s];
    }
  }
};

// The largest position up to `same` that lies within no chain of either: what runs before depends on nothing from there
// on.
inline std::size_t unspanned(const Returns& one, const Returns& other, std::size_t same) {
  for (std::size_t m = same; m-- > 0;) {
    for (const Returns* returns : {&one, &other}) {
      if (!returns->empty && returns->last[m] >= static_cast<int>(same)) {
        same = returns->first[m];
        m = same;
        break;
      }
    }
  }
  return same;
}

// In place of the run at i and of all others of `old`, `fresh`, one behind the other.
inline void put_in_place(std::vector<int>& group, std::size_t i, const std::vector<int>& old, const std::vector<int>& fresh) {
  const auto is_old = [&](int m) { return std::find(old.begin(), old.end(), m) != old.end(); };
  const auto at = static_cast<std::ptrdiff_t>(i) - std::count_if(group.begin(), group.begin() + i, is_old);
  group.erase(std::remove_if(group.begin(), group.end(), is_old), group.end());
  group.insert(group.begin() + at, fresh.begin(), fresh.end());
}

// A chain of the group at the `at`-th place among the others (counted round), with `between` of them after each piece.
inline void place_apart(std::vector<int>& group, const std::vector<int>& chain, std::uint64_t at, std::size_t between) {
  put_in_place(group, 0, chain, {});
  at %= group.size() + 1;
  for (std::size_t k = 0; k < chain.size(); ++k) {
    group.insert(group.begin() + std::min<std::size_t>(at + k * (1 + between), group.size()), chain[k]);
  }
}

}  // namespace dynapipe
