// What the ranks of one replica hold as its micro-batches come and go, and whether they have room for one more.
//
// Twin: `_admits` and `_safe` in schedules/search/dispatch.py.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "track.hpp"

namespace dynapipe {

class Admission {
 public:
  explicit Admission(Machine machine)
      : machine_(std::move(machine)), stage_(machine_.stages), rank_(machine_.ranks), most_working_(machine_.ranks),
        most_later_(machine_.ranks) {}

  const Machine& machine() const { return machine_; }

 protected:
  i64 cost(Field field, int s, int m) const { return records_[m][s * kFields + field]; }

  template <bool kChains>
  i64 taken(int s, int m) const {
    return kChains ? needs_.taken[m * machine_.stages + s] : cost(kStored, s, m);
  }
  // The position whose gradient runs as the k-th, and as which that of a position runs.
  template <bool kChains>
  int returning(int k) const {
    return kChains ? returns_->order[k] : k;
  }
  int place_of(int m) const { return returns_->empty ? m : returns_->place[m]; }

  // Whether the rank's memory takes position m on stage s now. `only_pending` tells that it would after pending W's.
  template <bool kLinear, bool kChains>
  bool admits(int r, int s, int m, bool* only_pending) {
    const int stages = kLinear ? 1 : static_cast<int>(machine_.rank_stages[r].size());
    const i64 room = machine_.free_bytes[r], fresh = rank_[r].held + taken<kChains>(s, m);
    i64 most_working = ready<kChains>(s, m);
    if (fresh + most_working - rank_[r].pending_bytes > room) return false;
    if (fresh + most_later_[r] + most_working_[r] <= room) return true;  // whatever runs next
    if (machine_.working_in_backward) {
      const bool in_turn = !machine_.split && stages == 1 && !kChains;  // then what is older has gone when a backward runs
      for (int k = 0; k < stages; ++k) {
        const int t = kLinear ? r : machine_.rank_stages[r][k];
        i64 gone = 0;
        each_inside<kChains>(t, [&](int q) {
          most_working = std::max(most_working, ready<kChains>(t, q) - gone);
          if (in_turn) gone += cost(kStored, t, q);
        });
      }
    }
    const i64 needed = fresh + most_working;
    if (needed - rank_[r].pending_bytes > room) return false;
    if (stages > 1 && !(kChains ? safe_with_chains(r, s, m) : safe(r, s, m))) return false;
    if (needed <= room) return true;
    *only_pending = true;
    return false;
  }

  Machine machine_;
  const i64* const* records_ = nullptr;
  const Returns* returns_ = nullptr;
  ChainNeeds needs_;
  std::vector<StageState> stage_;
  std::vector<RankState> rank_;
  std::vector<i64> most_working_, most_later_;  // [rank]: of all positions; of whole ones, and all chains together

 private:
  template <bool kChains>
  i64 ready(int s, int m) const {
    return kChains ? needs_.ready[m * machine_.stages + s] : cost(kWorking, s, m);
  }

  // Several stages on a rank: after this admission the micro-batches in flight can still complete, oldest first. Those
  // that are on all stages need no more than now; of the others the youngest leave the most room.
  bool safe(int r, int s, int m) const {
    const auto entered = [&](int t) { return stage_[t].entered + (t == s); };
    const std::vector<int>& mine = machine_.rank_stages[r];
    const int end = std::max(stage_[mine.front()].entered, s == mine.front() ? m + 1 : 0);
    int begin = end;
    for (int t : mine) begin = std::min(begin, entered(t));
    i64 inside = 0, lasting = 0;  // of these and all younger ones
    for (int q = end; q-- > begin;) {
      i64 missing = 0, coming = 0;
      for (int t : mine) {
        const bool is_inside = q < entered(t);
        (is_inside ? inside : missing) += cost(kStored, t, q);
        if (!is_inside || machine_.working_in_backward) {
          i64& most = is_inside ? lasting : coming;
          most = std::max(most, cost(kWorking, t, q));
        }
      }
      if (inside + missing + std::max(lasting, coming) > machine_.free_bytes[r]) return false;
    }
    return true;
  }

  bool safe_with_chains(int r, int s, int m) {
    const int lowest = machine_.rank_stages[r].front();
    i64 held = rank_[r].held - rank_[r].pending_bytes + taken<true>(s, m);
    const int begin = oldest(lowest, m), end = std::max(stage_[lowest].entered, s == lowest ? m + 1 : 0);
    find_lasting(r, s, m, begin, end);
    for (int q = begin; q < end; ++q) {
      i64 mine = 0, missing = 0, coming = 0;
      const bool ends = returns_->last[q] == q;
      for (int t : machine_.rank_stages[r]) {
        if (q >= stage_[t].entered && !(t == s && q == m)) {
          missing += taken<true>(t, q);
          coming = std::max(coming, ready<true>(t, q));
        }
        if (!ends) continue;
        for (int p = returns_->first[q]; p <= q; ++p) {
          if (returns_->last[p] == q && returns_->place[p] >= stage_[t].returned) mine += cost(kStored, t, p);
        }
      }
      if (held + missing + std::max(lasting_[q - begin], coming) > machine_.free_bytes[r]) return false;
      held += missing - mine;
      if (!machine_.working_in_backward) continue;
      for (int later = q + 1; later < std::min(returns_->last[q] + 1, end); ++later) {  // a chain is inside while others come and go
        lasting_[later - begin] = std::max(lasting_[later - begin], coming);
      }
    }
    return true;
  }

  // `lasting_` [position - begin]: the most working bytes, while it completes, of what is inside and has not gone before it.
  void find_lasting(int r, int s, int m, int begin, int end) {
    lasting_.assign(end - begin, 0);
    if (!machine_.working_in_backward) return;
    const auto stays = [&](int t, int p) {
      i64& most = lasting_[std::min(returns_->last[p], end - 1) - begin];
      most = std::max(most, ready<true>(t, p));
    };
    stays(s, m);
    for (int t : machine_.rank_stages[r]) each_inside<true>(t, [&](int p) { stays(t, p); });
    for (std::size_t k = lasting_.size(); k-- > 1;) lasting_[k - 1] = std::max(lasting_[k - 1], lasting_[k]);
  }

  // Positions whose forward has started on a stage and whose gradient has not, as they return.
  template <bool kChains, typename Visit>
  void each_inside(int s, Visit visit) const {
    int inside = stage_[s].entered - stage_[s].returned;
    for (int back = stage_[s].returned; inside > 0; ++back) {
      const int q = returning<kChains>(back);
      if (kChains && q >= stage_[s].entered) continue;
      visit(q);
      --inside;
    }
  }

  // The first position whose forward has started on a stage and whose gradient has not; m where there is none.
  int oldest(int s, int m) const {
    for (int q = 0; q < stage_[s].entered; ++q) {
      if (returns_->place[q] >= stage_[s].returned) return q;
    }
    return m;
  }

  std::vector<i64> lasting_;  // see find_lasting
};

}  // namespace dynapipe
