// One replica's micro-batches in injection order, and the dispatch rules that order their actions.
//
// Twin: schedules/search/dispatch.py. Both must make the same choices in the same order: plans have the same bytes with either.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "track.hpp"

namespace dynapipe {

// Runs rules. A position is a place in the injection order; every stage runs its forwards in that order, and its
// gradients in that of `Returns`.
class Dispatcher {
 public:
  explicit Dispatcher(Machine machine)
      : machine_(std::move(machine)), stage_(machine_.stages), rank_(machine_.ranks), work_(machine_.ranks),
        head_(machine_.ranks), tail_(machine_.ranks), most_working_(machine_.ranks) {
    linear_ = machine_.ranks == machine_.stages;
    for (int s = 0; s < machine_.stages; ++s) linear_ &= machine_.stage_rank[s] == s;
  }

  const Machine& machine() const { return machine_; }

  // Makespan, or at least `give_up` (kNever: memory blocks it) once it is known to be that. `track` holds the records
  // and the rule, and receives the rest; `like`, if given, is a finished run. `orders`, if given, receives each rank's
  // actions (then `like` is not used).
  i64 run(Track& track, const Track* like, i64 give_up, std::vector<std::vector<Chosen>>* orders) {
    records_ = track.records.data();
    count_ = static_cast<int>(track.records.size());
    if (orders) orders->assign(machine_.ranks, {});
    if (count_ == 0) return 0;
    if (hopeless(track, give_up)) return kNever;
    track.returns.set(track.chain_of);
    returns_ = &track.returns;
    if (!returns_->empty) needs_.set(machine_.stages, records_, *returns_);
    begin(track, orders ? nullptr : like);
    if (!returns_->empty) {
      return linear_ ? dispatch<true, true>(track, give_up, orders) : dispatch<false, true>(track, give_up, orders);
    }
    return linear_ ? dispatch<true, false>(track, give_up, orders) : dispatch<false, false>(track, give_up, orders);
  }

  // `ways` [rank] of one record.
  void measure(const i64* record, Way* ways) const {
    i64 down = 0, up = 0;
    std::fill(ways, ways + machine_.ranks, Way{0, 0, 0, 0});
    for (int s = 0; s < machine_.stages; ++s) {
      const int r = machine_.stage_rank[s];
      const i64* const cost = record + s * kFields;
      if (s == machine_.rank_stages[r].front()) {
        ways[r].down = down;
        ways[r].up = machine_.split ? 0 : up;  // a W may come last
      }
      ways[r].working = std::max(ways[r].working, cost[kWorking]);
      ways[r].work += cost[kForward] + cost[kGradient] + (machine_.split ? cost[kWeight] : 0);
      const bool crosses = s + 1 < machine_.stages && machine_.stage_rank[s + 1] != r;
      down += cost[kForward] + (crosses ? cost[kTransfer] : 0);
      up += cost[kGradient] + (crosses ? cost[kTransfer] : 0);
    }
  }

 private:
  i64 cost(Field field, int s, int m) const { return records_[m][s * kFields + field]; }

  template <bool kChains>
  i64 taken(int s, int m) const {
    return kChains ? needs_.taken[m * machine_.stages + s] : cost(kStored, s, m);
  }
  template <bool kChains>
  i64 ready(int s, int m) const {
    return kChains ? needs_.ready[m * machine_.stages + s] : cost(kWorking, s, m);
  }
  // The position whose gradient runs as the k-th, and as which that of a position runs.
  template <bool kChains>
  int returning(int k) const {
    return kChains ? returns_->order[k] : k;
  }
  int place_of(int m) const { return returns_->empty ? m : returns_->place[m]; }

  // Whether some rank's work, with the least way to it and back, takes that long already.
  bool hopeless(const Track& track, i64 give_up) {
    const int ranks = machine_.ranks;
    std::fill(work_.begin(), work_.end(), 0);
    std::fill(tail_.begin(), tail_.end(), kNever);
    std::fill(head_.begin(), head_.end(), kNever);
    std::fill(most_working_.begin(), most_working_.end(), 0);
    for (const Way* way : track.ways) {
      for (int r = 0; r < ranks; ++r) {
        work_[r] += way[r].work;
        head_[r] = std::min(head_[r], way[r].down);
        tail_[r] = std::min(tail_[r], way[r].up);
        most_working_[r] = std::max(most_working_[r], way[r].working);
      }
    }
    bool found = false;
    for (int r = 0; r < ranks; ++r) found |= head_[r] + work_[r] + tail_[r] >= give_up;
    return found;
  }

  // The start, or what `like` had come to where its positions begin to differ.
  void begin(Track& track, const Track* like) {
    const std::size_t stages = machine_.stages, ranks = machine_.ranks;
    track.forward_at.resize(stages * count_);
    track.gradient_at.resize(stages * count_);
    track.weights.resize(ranks);
    track.stages.resize(stages * count_);
    track.ranks.resize(ranks * count_);
    track.moments.resize(count_);
    std::size_t same = 0;
    if (like && like->rule == track.rule) {
      const std::size_t most = std::min(track.records.size(), like->records.size());
      while (same < most && like->records[same] == track.records[same] && like->chain_of[same] == track.chain_of[same]) ++same;
      same = std::min(same, most - 1);
      if (like->returns.longest != track.returns.longest) same = 0;
      same = unspanned(like->returns, track.returns, same);
    }
    if (same == 0) {
      std::fill(track.forward_at.begin(), track.forward_at.end(), kNever);
      std::fill(track.gradient_at.begin(), track.gradient_at.end(), kNever);
      for (auto& ready : track.weights) ready.clear();
      now_ = {0, 0};
      std::fill(stage_.begin(), stage_.end(), StageState{0, 0});
      std::fill(rank_.begin(), rank_.end(), RankState{kNever, 0, 0, 0, 0, 0, 0, 0, false});
      rank_[machine_.stage_rank[0]].wake = 0;
      keep(track, 0);
      return;
    }
    std::copy_n(like->stages.begin(), stages * (same + 1), track.stages.begin());
    std::copy_n(like->ranks.begin(), ranks * (same + 1), track.ranks.begin());
    std::copy_n(like->moments.begin(), same + 1, track.moments.begin());
    std::copy_n(track.stages.begin() + stages * same, stages, stage_.begin());
    std::copy_n(track.ranks.begin() + ranks * same, ranks, rank_.begin());
    now_ = track.moments[same];
    std::copy_n(like->forward_at.begin(), stages * same, track.forward_at.begin());
    std::copy_n(like->gradient_at.begin(), stages * same, track.gradient_at.begin());
    std::fill(track.forward_at.begin() + stages * same, track.forward_at.end(), kNever);
    std::fill(track.gradient_at.begin() + stages * same, track.gradient_at.end(), kNever);
    for (std::size_t s = 0; s < stages; ++s) {  // what had not arrived by then
      if (s > 0) {
        for (std::size_t m = stage_[s - 1].entered; m < same; ++m) track.forward_at[m * stages + s] = kNever;
      }
      if (s + 1 == stages) {
        for (std::size_t m = stage_[s].entered; m < same; ++m) track.gradient_at[m * stages + s] = kNever;
        continue;
      }
      const int back = stage_[s + 1].returned;
      for (std::size_t m = returns_->empty ? back : 0; m < same; ++m) {
        if (place_of(static_cast<int>(m)) >= back) track.gradient_at[m * stages + s] = kNever;
      }
    }
    for (std::size_t r = 0; r < ranks; ++r) {
      const auto& ready = like->weights[r];
      track.weights[r].assign(ready.begin(), ready.begin() + rank_[r].weights_ready);
    }
  }

  void keep(Track& track, int position) {
    std::copy(stage_.begin(), stage_.end(), track.stages.begin() + stage_.size() * position);
    std::copy(rank_.begin(), rank_.end(), track.ranks.begin() + rank_.size() * position);
    track.moments[position] = now_;
  }

  // kLinear: stage s is on rank s, which the search runs most; its one stage a rank is then known to the compiler.
  template <bool kLinear, bool kChains>
  i64 dispatch(Track& track, i64 give_up, std::vector<std::vector<Chosen>>* orders) {
    const Rule rule = *track.rule;
    const int ranks = machine_.ranks, all = machine_.stages * count_ * (machine_.split ? 3 : 2);
    while (now_.done < all) {
      int r = 0;
      i64 time = rank_[0].wake;
      for (int other = 1; other < ranks; ++other) {
        const bool sooner = rank_[other].wake < time;
        time = sooner ? rank_[other].wake : time;
        r = sooner ? other : r;
      }
      if (time >= kNever) return kNever;
      RankState& mine = rank_[r];
      i64 next = kNever;
      Chosen chosen{};
      if (!choose<kLinear, kChains>(track, rule, r, time, &chosen, &next)) {
        mine.wake = next;
        continue;
      }
      const i64 end = start<kLinear, kChains>(track, rule, r, time, chosen);
      if (orders) (*orders)[r].push_back(chosen);
      mine.worked += end - time;
      if (end + work_[r] - mine.worked + tail_[r] >= give_up) return kNever;
      now_.makespan = std::max(now_.makespan, end);
      mine.wake = mine.free_at = end;
      ++now_.done;
      if (chosen.kind == kForward && chosen.stage == 0 && chosen.position + 1 < count_) keep(track, chosen.position + 1);
    }
    return now_.makespan;
  }

  // Whether the rank's memory takes position m on stage s now. `only_pending` tells that it would after pending W's.
  template <bool kLinear, bool kChains>
  bool admits(int r, int s, int m, bool* only_pending) const {
    const int stages = kLinear ? 1 : static_cast<int>(machine_.rank_stages[r].size());
    const i64 room = machine_.free_bytes[r], fresh = rank_[r].held + taken<kChains>(s, m);
    i64 most_working = ready<kChains>(s, m);
    if (fresh + most_working - rank_[r].pending_bytes > room) return false;
    if (most_held<kLinear, kChains>(r, s, m) + most_working_[r] <= room) return true;  // whatever runs next
    if (machine_.working_in_backward) {
      const bool in_turn = !machine_.split && stages == 1 && !kChains;  // then what is older has gone when a backward runs
      for (int k = 0; k < stages; ++k) {
        const int t = kLinear ? r : machine_.rank_stages[r][k];
        i64 gone = 0;
        int inside = stage_[t].entered - stage_[t].returned;
        for (int back = stage_[t].returned; inside > 0; ++back) {
          const int q = returning<kChains>(back);
          if (kChains && q >= stage_[t].entered) continue;
          most_working = std::max(most_working, ready<kChains>(t, q) - gone);
          if (in_turn) gone += cost(kStored, t, q);
          --inside;
        }
      }
    }
    const i64 needed = fresh + most_working;
    if (needed - rank_[r].pending_bytes > room) return false;
    if (stages > 1 && !safe<kChains>(r, s, m, most_working)) return false;
    if (needed <= room) return true;
    *only_pending = true;
    return false;
  }

  // What the rank may come to hold of position m and all before it.
  template <bool kLinear, bool kChains>
  i64 most_held(int r, int s, int m) const {
    if (kLinear) return rank_[r].held + taken<kChains>(s, m);
    return rank_[r].pending_bytes + rank_[r].whole + (s == machine_.rank_stages[r].front() ? on_all<kChains>(r, m) : 0);
  }
  template <bool kChains>
  i64 on_all(int r, int m) const {
    i64 bytes = 0;
    for (int t : machine_.rank_stages[r]) bytes += taken<kChains>(t, m);
    return bytes;
  }

  // Several stages on a rank: after this admission the micro-batches in flight can still complete, oldest first.
  template <bool kChains>
  bool safe(int r, int s, int m, i64 most_working) const {
    const int lowest = machine_.rank_stages[r].front();
    i64 held = rank_[r].held - rank_[r].pending_bytes + taken<kChains>(s, m);
    const int end = std::max(stage_[lowest].entered, s == lowest ? m + 1 : 0);
    i64 lasting = machine_.working_in_backward ? most_working : 0;
    int q = kChains ? oldest(lowest, m) : stage_[lowest].returned;
    for (; q < end; ++q) {
      i64 mine = 0, missing = 0, working = lasting;
      const bool ends = !kChains || returns_->last[q] == q;
      for (int t : machine_.rank_stages[r]) {
        if (q >= stage_[t].entered && !(t == s && q == m)) {
          missing += taken<kChains>(t, q);
          working = std::max(working, ready<kChains>(t, q));
        }
        if (!ends) continue;
        for (int p = kChains ? returns_->first[q] : q; p <= q; ++p) {
          if (kChains && (returns_->last[p] != q || returns_->place[p] < stage_[t].returned)) continue;
          if (!kChains && p < stage_[t].returned) continue;
          mine += cost(kStored, t, p);
        }
      }
      if (held + missing + working > machine_.free_bytes[r]) return false;
      held += missing - mine;
      if (machine_.working_in_backward && !ends) lasting = working;  // the chain is inside while others come and go
    }
    return true;
  }

  // The first position whose forward has started on a stage and whose gradient has not; m where there is none.
  int oldest(int s, int m) const {
    for (int q = 0; q < stage_[s].entered; ++q) {
      if (returns_->place[q] >= stage_[s].returned) return q;
    }
    return m;
  }

  // The action to start now; false with the next time to look at (`next`) where there is none.
  template <bool kLinear, bool kChains>
  bool choose(Track& track, const Rule& rule, int r, i64 time, Chosen* chosen, i64* next) {
    const int num_pending = rank_[r].weights_ready - rank_[r].weights_done;
    if (num_pending > rule.most_pending) return take_weight(track, r, chosen);
    const int stages = machine_.stages;
    int gradient_stage = -1, gradient_back = 1 << 30;
    int forward_stage = -1;
    bool after_weights = false, awaited = false;
    for (int k = kLinear ? 1 : static_cast<int>(machine_.rank_stages[r].size()); k-- > 0;) {
      const int s = kLinear ? r : machine_.rank_stages[r][k], back = stage_[s].returned, m = stage_[s].entered;
      const bool has_head = back < m && returning<kChains>(back) < m;
      if (has_head) {
        const i64 at = track.gradient_at[returning<kChains>(back) * stages + s];
        if (at > time) {
          *next = std::min(*next, at);
        } else if (back < gradient_back) {
          gradient_stage = s;
          gradient_back = back;
        }
      }
      const int most = std::max(1, stages - s + rule.extra) + (kChains ? returns_->longest - 1 : 0);
      if (m < count_ && forward_stage < 0 && !(rule.extra < kNoCap && has_head && m - back >= most)) {
        const i64 at = s == 0 ? 0 : track.forward_at[m * stages + s];
        bool blocked = false;
        if (at > time) {
          *next = std::min(*next, at);
          awaited = true;
        } else if (admits<kLinear, kChains>(r, s, m, &blocked)) {
          forward_stage = s;
        } else if (blocked) {
          after_weights = true;
        }
      }
    }
    const bool has_gradient = gradient_stage >= 0;
    awaited &= rule.rhythm > 1 && forward_stage < 0;
    if (has_gradient && !((rank_[r].wants_forward || rule.rhythm > 1) && (forward_stage >= 0 || after_weights || awaited))) {
      *chosen = {gradient_stage, returning<kChains>(gradient_back), kGradient};
      return true;
    }
    if (forward_stage >= 0) {
      *chosen = {forward_stage, stage_[forward_stage].entered, kForward};
      return true;
    }
    if (after_weights) return take_weight(track, r, chosen);
    if (num_pending > 0) {
      const Chosen& front = track.weights[r][rank_[r].weights_done];
      const i64 duration = cost(kWeight, front.stage, front.position);
      if (*next >= kNever || (time + duration - *next) * 4 <= duration * rule.patience) return take_weight(track, r, chosen);
    }
    return false;
  }

  bool take_weight(Track& track, int r, Chosen* chosen) {
    *chosen = track.weights[r][rank_[r].weights_done++];
    return true;
  }

  template <bool kLinear, bool kChains>
  i64 start(Track& track, const Rule& rule, int r, i64 time, const Chosen& c) {
    const int s = c.stage, m = c.position, stages = machine_.stages;
    const i64 end = time + cost(c.kind, s, m), stored = cost(kStored, s, m);
    RankState& mine = rank_[r];
    if (c.kind == kForward) {
      mine.held += taken<kChains>(s, m);
      if (!kLinear && s == machine_.rank_stages[r].front()) mine.whole += on_all<kChains>(r, m);
      ++stage_[s].entered;
      if (s + 1 == stages) {
        track.gradient_at[m * stages + s] = end;
      } else {
        arrive(s + 1, end + hop<kLinear>(s, m), &track.forward_at[m * stages + s + 1]);
      }
      mine.wants_forward = false;
    } else if (c.kind == kGradient) {
      ++stage_[s].returned;
      if (!kLinear && s == machine_.rank_stages[r].front()) mine.whole -= on_all<false>(r, m);
      if (machine_.split) {
        track.weights[r].push_back({s, m, kWeight});
        ++mine.weights_ready;
        mine.pending_bytes += stored;
      } else {
        mine.held -= stored;
      }
      if (s > 0) arrive(s - 1, end + hop<kLinear>(s - 1, m), &track.gradient_at[m * stages + s - 1]);
      mine.wants_forward = rule.rhythm > 0;
    } else {
      mine.held -= stored;
      mine.pending_bytes -= stored;
    }
    return end;
  }

  template <bool kLinear>
  i64 hop(int low, int m) const {
    const bool crosses = kLinear || machine_.stage_rank[low] != machine_.stage_rank[low + 1];
    return crosses ? cost(kTransfer, low, m) : 0;
  }

  void arrive(int s, i64 at, i64* when) {
    *when = at;
    RankState& theirs = rank_[machine_.stage_rank[s]];
    theirs.wake = std::min(theirs.wake, std::max(at, theirs.free_at));
  }

  Machine machine_;
  bool linear_ = true;
  const i64* const* records_ = nullptr;
  int count_ = 0;
  const Returns* returns_ = nullptr;
  ChainNeeds needs_;
  Moment now_{};
  std::vector<StageState> stage_;
  std::vector<RankState> rank_;
  std::vector<i64> work_, head_, tail_;
  std::vector<i64> most_working_;  // [rank]: of all positions
};

}  // namespace dynapipe
