// Pieces of one sample: the order of their gradients, and what they need together.
#pragma once

#include "numbers.hpp"

namespace dynapipe {

// A micro-batch's costs on a stage. Transfer is to or from the next stage.
enum Field { kForward, kGradient, kWeight, kStored, kWorking, kTransfer, kFields };

// The order in which gradients run on every stage, by position in the injection order.
struct GradientOrder {
  std::vector<int> order, place;   // positions as their gradients run on every stage; each position's place there
  std::vector<int> first, last;    // pieces of the sample of each position; itself if it is whole
  int most_pieces = 1;             // of one sample
  bool empty = true;               // no pieces: the rest is not filled, and gradients run in injection order

  // `sample_of` [position]: the number of its cut sample, or -1; pieces stand in order.
  void set(const std::vector<int>& sample_of) {
    const int count = static_cast<int>(sample_of.size());
    most_pieces = 1;
    empty = std::all_of(sample_of.begin(), sample_of.end(), [](int sample) { return sample < 0; });
    if (empty) return;
    const int samples = 1 + *std::max_element(sample_of.begin(), sample_of.end());
    std::vector<int> begins(samples, -1), ends(samples, -1), pieces(samples, 0);
    for (int m = 0; m < count; ++m) {
      const int sample = sample_of[m];
      if (sample < 0) continue;
      if (begins[sample] < 0) begins[sample] = m;
      ends[sample] = m;
      most_pieces = std::max(most_pieces, ++pieces[sample]);
    }
    first.resize(count);
    last.resize(count);
    place.resize(count);
    order.clear();
    for (int m = 0; m < count; ++m) {
      first[m] = sample_of[m] < 0 ? m : begins[sample_of[m]];
      last[m] = sample_of[m] < 0 ? m : ends[sample_of[m]];
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

// What the forward of each position takes until its gradient, and the working bytes to keep ready while it is inside. The
// first piece of a sample takes the bytes of all its pieces; any of them may run while it is inside.
struct PieceNeeds {
  std::vector<i64> taken, ready;  // [position][stage]

  void set(int stages, const i64* const* records, const GradientOrder& gradients) {
    const int count = static_cast<int>(gradients.order.size());
    taken.resize(static_cast<std::size_t>(count) * stages);
    ready.resize(taken.size());
    for (int m = 0; m < count; ++m) {
      const int first = gradients.first[m];
      for (int s = 0; s < stages; ++s) {
        const i64 stored = records[m][s * kFields + kStored], working = records[m][s * kFields + kWorking];
        taken[m * stages + s] = 0;
        taken[first * stages + s] += stored;
        ready[m * stages + s] = working;
        ready[first * stages + s] = std::max(ready[first * stages + s], working);
      }
    }
    for (int m = 0; m < count; ++m) {
      for (int s = 0; s < stages; ++s) ready[m * stages + s] = ready[gradients.first[m] * stages + s];
    }
  }
};

// The largest position up to `same` that lies between no two pieces of a sample in either order: nothing before it
// depends on what comes from there on.
inline std::size_t unspanned(const GradientOrder& one, const GradientOrder& other, std::size_t same) {
  for (std::size_t m = same; m-- > 0;) {
    for (const GradientOrder* gradients : {&one, &other}) {
      if (!gradients->empty && gradients->last[m] >= static_cast<int>(same)) {
        same = gradients->first[m];
        m = same;
        break;
      }
    }
  }
  return same;
}

// Replaces the cut at place i, and all others of `old`, by those of `fresh`, which then stand together.
inline void put_in_place(std::vector<int>& group, std::size_t i, const std::vector<int>& old, const std::vector<int>& fresh) {
  const auto is_old = [&](int m) { return std::find(old.begin(), old.end(), m) != old.end(); };
  const auto at = static_cast<std::ptrdiff_t>(i) - std::count_if(group.begin(), group.begin() + i, is_old);
  group.erase(std::remove_if(group.begin(), group.end(), is_old), group.end());
  group.insert(group.begin() + at, fresh.begin(), fresh.end());
}

}  // namespace dynapipe
