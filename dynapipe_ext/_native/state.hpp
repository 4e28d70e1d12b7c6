// What a search changes: cuts of items, their replicas and orders, and how long those take.
#pragma once

#include "track.hpp"

namespace dynapipe {

struct Random {  // splitmix64 (Steele, Lea and Flood 2014)
  std::uint64_t state;
  std::uint64_t next() {
    state += 0x9E3779B97F4A7C15ull;
    std::uint64_t z = state;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }
  int below(std::size_t n) { return static_cast<int>(next() % n); }
};

struct Cut {
  int first, end, kind;  // items first .. end - 1; first < 0: a cut that was merged away
};

struct State {
  std::vector<Cut> cuts;
  std::vector<std::vector<int>> groups;  // [replica]: cuts in injection order
  std::vector<int> policy;                 // [replica]
  std::vector<i64> makespan;             // [replica]
  i64 floor = 0;                         // the least time of the step if ranks share cores
};

// Which moves of an endless walk a search makes: `moves` after those that are begun. After `cooling` moves a move may cost
// half of what the first may, so a longer walk begins as a shorter one.
struct AnnealingSchedule {
  std::uint64_t seed;
  i64 moves, begun, cooling;

  // By how much move number `step` may exceed that.
  i64 allowance(i64 of, i64 step) const { return of / 4096 * cooling / (cooling + step); }
};

struct SharedCores {  // a step takes at least work x tp / cores; tp 0: every rank has a core of its own
  i64 tp = 0, cores = 1;
};

// The replicas' makespans, with their sum and the first of the largest at hand: a tournament of pairs.
class Makespans {
 public:
  explicit Makespans(const std::vector<i64>& of) : leaves_(1) {
    while (leaves_ < of.size()) leaves_ *= 2;
    winner_.assign(2 * leaves_, 0);
    time_.assign(leaves_, -1);
    for (std::size_t d = 0; d < leaves_; ++d) winner_[leaves_ + d] = static_cast<int>(d);
    for (std::size_t k = leaves_; k-- > 1;) winner_[k] = winner_[2 * k];
    for (std::size_t d = 0; d < of.size(); ++d) {
      time_[d] = 0;
      set(static_cast<int>(d), of[d]);
    }
  }
  void set(int d, i64 time) {
    sum_ += time - time_[d];
    time_[d] = time;
    for (std::size_t k = (leaves_ + d) / 2; k; k /= 2) {
      const int left = winner_[2 * k], right = winner_[2 * k + 1];
      winner_[k] = time_[right] > time_[left] ? right : left;
    }
  }
  i64 of(int d) const { return time_[d]; }
  i64 sum() const { return sum_; }
  int largest() const { return leaves_ > 1 ? winner_[1] : 0; }

 private:
  std::size_t leaves_;
  std::vector<int> winner_;
  std::vector<i64> time_;
  i64 sum_ = 0;
};

}  // namespace dynapipe
