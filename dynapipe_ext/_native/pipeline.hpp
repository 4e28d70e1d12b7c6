// One replica's micro-batches in injection order, and the dispatch policies that order their actions.
#pragma once

#include "admission.hpp"

namespace dynapipe {

// Dispatches by a policy. A position is a place in the injection order; every stage runs its forwards in that order, and
// its gradients in that of `GradientOrder`.
class Dispatcher : public Admission {
 public:
  explicit Dispatcher(Machine machine)
      : Admission(std::move(machine)), work_(machine_.ranks), tail_(machine_.ranks), pieces_later_(machine_.ranks) {
    linear_ = machine_.ranks == machine_.stages && machine_.is_short.empty();
    for (int s = 0; s < machine_.stages; ++s) linear_ &= machine_.stage_rank[s] == s;
  }

  // Makespan, or at least `give_up` (kNever: memory blocks it) once it is known to be that. `track` holds the records
  // and the policy, and receives the rest; `like`, if given, is a finished pass.
  i64 run(Track& track, const Track* like, i64 give_up) {
    records_ = track.records.data();
    count_ = static_cast<int>(track.records.size());
    track.sequence.clear();
    if (count_ == 0) return 0;
    if (least(track) >= give_up) return kNever;
    if (!gradients_->empty) needs_.set(machine_.stages, records_, *gradients_);
    begin(track, like);
    if (!gradients_->empty) return linear_ ? dispatch<true, true>(track, give_up) : dispatch<false, true>(track, give_up);
    return linear_ ? dispatch<true, false>(track, give_up) : dispatch<false, false>(track, give_up);
  }

  // What some rank alone takes already: its whole work, after the first micro-batch's way to it and before the way back
  // of the last one.
  i64 least(Track& track) {
    count_ = static_cast<int>(track.records.size());
    if (count_ == 0) return 0;
    track.gradients.set(track.sample_of);
    gradients_ = &track.gradients;
    const int ranks = machine_.ranks;
    std::fill(work_.begin(), work_.end(), 0);
    std::fill(most_working_.begin(), most_working_.end(), 0);
    std::fill(most_later_.begin(), most_later_.end(), 0);
    std::fill(pieces_later_.begin(), pieces_later_.end(), 0);
    for (int m = 0; m < count_; ++m) {
      const Way* way = track.ways[m];
      const bool is_whole = track.sample_of[m] < 0;
      for (int r = 0; r < ranks; ++r) {
        work_[r] += way[r].work;
        most_working_[r] = std::max(most_working_[r], way[r].working);
        most_later_[r] = std::max(most_later_[r], is_whole ? way[r].later : 0);
        pieces_later_[r] += is_whole ? 0 : way[r].later;
      }
    }
    const Way *first = track.ways.front(), *last = track.ways[gradients_->empty ? count_ - 1 : gradients_->order.back()];
    i64 most = 0;
    for (int r = 0; r < ranks; ++r) {
      most_later_[r] += pieces_later_[r];
      tail_[r] = last[r].up;
      most = std::max(most, first[r].down + work_[r] + tail_[r]);
    }
    return most;
  }

 private:
  // Begins at the start, or as far as `like` had come when its positions begin to differ.
  void begin(Track& track, const Track* like) {
    const std::size_t stages = machine_.stages, ranks = machine_.ranks;
    track.forward_at.resize(stages * count_);
    track.gradient_at.resize(stages * count_);
    track.weights.resize(ranks);
    track.stages.resize(stages * count_);
    track.ranks.resize(ranks * count_);
    track.moments.resize(count_);
    std::size_t same = 0;
    if (like && like->policy == track.policy) {
      const std::size_t most = std::min(track.records.size(), like->records.size());
      while (same < most && like->records[same] == track.records[same] && like->sample_of[same] == track.sample_of[same]) ++same;
      same = std::min(same, most - 1);
      if (like->gradients.most_pieces != track.gradients.most_pieces) same = 0;
      same = unspanned(like->gradients, track.gradients, same);
    }
    if (same == 0) {
      std::fill(track.forward_at.begin(), track.forward_at.end(), kNever);
      std::fill(track.gradient_at.begin(), track.gradient_at.end(), kNever);
      for (auto& ready : track.weights) ready.clear();
      now_ = {0, 0};
      std::fill(stage_.begin(), stage_.end(), StageState{0, 0, kNever, kNever});
      std::fill(rank_.begin(), rank_.end(), RankState{kNever, 0, 0, 0, 0, 0, 0, false});
      rank_[machine_.stage_rank[0]].wake = stage_[0].forward_at = 0;
      keep(track, 0);
      return;
    }
    std::copy_n(like->stages.begin(), stages * (same + 1), track.stages.begin());
    std::copy_n(like->ranks.begin(), ranks * (same + 1), track.ranks.begin());
    std::copy_n(like->moments.begin(), same + 1, track.moments.begin());
    std::copy_n(track.stages.begin() + stages * same, stages, stage_.begin());
    std::copy_n(track.ranks.begin() + ranks * same, ranks, rank_.begin());
    now_ = track.moments[same];
    if (track.keeps_sequence) track.sequence.assign(like->sequence.begin(), like->sequence.begin() + now_.done);
    std::copy_n(like->forward_at.begin(), stages * same, track.forward_at.begin());
    std::copy_n(like->gradient_at.begin(), stages * same, track.gradient_at.begin());
    std::fill(track.forward_at.begin() + stages * same, track.forward_at.end(), kNever);
    std::fill(track.gradient_at.begin() + stages * same, track.gradient_at.end(), kNever);
    for (std::size_t s = 0; s < stages; ++s) {  // what had not arrived by then
      if (s > 0) {
        for (std::size_t m = stage_[s - 1].forwards_started; m < same; ++m) track.forward_at[m * stages + s] = kNever;
      }
      if (s + 1 == stages) {
        for (std::size_t m = stage_[s].forwards_started; m < same; ++m) track.gradient_at[m * stages + s] = kNever;
        continue;
      }
      const int back = stage_[s + 1].gradients_started;
      for (std::size_t m = gradients_->empty ? back : 0; m < same; ++m) {
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
  template <bool kLinear, bool kPieces>
  i64 dispatch(Track& track, i64 give_up) {
    const DispatchPolicy policy = *track.policy;
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
      if (!choose<kLinear, kPieces>(track, policy, r, time, &chosen, &next)) {
        mine.wake = next;
        continue;
      }
      const i64 end = start<kLinear, kPieces>(track, policy, r, time, chosen);
      if (track.keeps_sequence) track.sequence.push_back(chosen);
      mine.worked += end - time;
      if (end + work_[r] - mine.worked + tail_[r] >= give_up) return kNever;
      now_.makespan = std::max(now_.makespan, end);
      mine.wake = mine.free_at = end;
      ++now_.done;
      if (chosen.kind == kForward && chosen.stage == 0 && chosen.position + 1 < count_) keep(track, chosen.position + 1);
    }
    return now_.makespan;
  }

  // Chooses the action to start now; false with the next time to look at (`next`) if there is none.
  template <bool kLinear, bool kPieces>
  bool choose(Track& track, const DispatchPolicy& policy, int r, i64 time, Chosen* chosen, i64* next) {
    const int num_pending = rank_[r].weights_ready - rank_[r].weights_done;
    const int stages = machine_.stages, count = kLinear ? 1 : static_cast<int>(machine_.rank_stages[r].size());
    const int* const mine = kLinear ? &r : machine_.rank_stages[r].data();
    int gradient_stage = -1, gradient_back = 1 << 30;
    for (int k = count; k-- > 0;) {
      const StageState& stage = stage_[mine[k]];
      if (stage.gradient_at > time) {
        *next = std::min(*next, stage.gradient_at);
      } else if (stage.gradients_started < gradient_back) {
        gradient_stage = mine[k];
        gradient_back = stage.gradients_started;
      }
    }
    if (!kLinear && !machine_.is_short.empty() && choose_short<kPieces>(r, time, chosen)) return true;
    const bool has_gradient = gradient_stage >= 0;
    if (has_gradient) {
      *chosen = {gradient_stage, nth_gradient<kPieces>(gradient_back), kGradient};
      if (!rank_[r].wants_forward && policy.rhythm <= 1) return true;
    }
    int forward_stage = -1;
    bool after_weights = false, awaited = false;
    for (int k = count; k-- > 0 && forward_stage < 0;) {
      const int s = mine[k], back = stage_[s].gradients_started, m = stage_[s].forwards_started;
      if (m == count_) continue;
      if (policy.extra < kNoCap) {
        const bool has_head = back < m && nth_gradient<kPieces>(back) < m;
        const int most = std::max(1, stages - s + policy.extra) + (kPieces ? gradients_->most_pieces - 1 : 0);
        if (has_head && m - back >= most) continue;
      }
      const i64 at = stage_[s].forward_at;
      bool blocked = false;
      if (at > time) {
        *next = std::min(*next, at);
        awaited = true;
      } else if (admits<kLinear, kPieces>(r, s, m, &blocked)) {
        forward_stage = s;
      } else if (blocked) {
        after_weights = true;
      }
    }
    awaited &= policy.rhythm > 1 && forward_stage < 0;
    if (has_gradient && forward_stage < 0 && !after_weights && !awaited) return true;
    if (forward_stage >= 0) {
      *chosen = {forward_stage, stage_[forward_stage].forwards_started, kForward};
      return true;
    }
    if (after_weights) return take_weight(track, r, chosen);
    if (num_pending > 0) {
      const Chosen& front = track.weights[r][rank_[r].weights_done];
      const i64 duration = cost(kWeight, front.stage, front.position);
      if (*next >= kNever || (time + duration - *next) * 4 <= duration * policy.patience) return take_weight(track, r, chosen);
    }
    return false;
  }

  // What is ready on a short stage of the rank, gradients first: it is waited for elsewhere, and delays little here.
  template <bool kPieces>
  bool choose_short(int r, i64 time, Chosen* chosen) {
    const std::vector<int>& mine = machine_.rank_stages[r];
    for (std::size_t k = mine.size(); k-- > 0;) {
      const StageState& stage = stage_[mine[k]];
      if (!machine_.is_short[mine[k]] || stage.gradient_at > time) continue;
      *chosen = {mine[k], nth_gradient<kPieces>(stage.gradients_started), kGradient};
      return true;
    }
    for (std::size_t k = mine.size(); k-- > 0;) {
      const int s = mine[k], m = stage_[s].forwards_started;
      bool blocked = false;
      if (!machine_.is_short[s] || m == count_ || stage_[s].forward_at > time) continue;
      if (!admits<false, kPieces>(r, s, m, &blocked)) continue;
      *chosen = {s, m, kForward};
      return true;
    }
    return false;
  }

  bool take_weight(Track& track, int r, Chosen* chosen) {
    *chosen = track.weights[r][rank_[r].weights_done++];
    return true;
  }

  template <bool kLinear, bool kPieces>
  i64 start(Track& track, const DispatchPolicy& policy, int r, i64 time, const Chosen& c) {
    const int s = c.stage, m = c.position, stages = machine_.stages;
    const i64 end = time + cost(c.kind, s, m), stored = cost(kStored, s, m);
    const bool is_short = !kLinear && is_on_short(s);
    RankState& mine = rank_[r];
    if (c.kind == kForward) {
      mine.held += taken<kPieces>(s, m);
      StageState& stage = stage_[s];
      ++stage.forwards_started;
      stage.forward_at = s == 0 ? 0 : m + 1 < count_ ? track.forward_at[(m + 1) * stages + s] : kNever;
      if (s + 1 == stages) {
        gradient_arrives<kPieces>(track, s, m, end);
      } else {
        const i64 at = end + hop<kLinear>(s, m);
        track.forward_at[m * stages + s + 1] = at;
        if (stage_[s + 1].forwards_started == m) stage_[s + 1].forward_at = at;
        wake(s + 1, at);
      }
      if (!is_short) mine.wants_forward = false;
    } else if (c.kind == kGradient) {
      StageState& stage = stage_[s];
      stage.gradient_at = ++stage.gradients_started < count_ ? track.gradient_at[nth_gradient<kPieces>(stage.gradients_started) * stages + s] : kNever;
      if (machine_.split) {
        track.weights[r].push_back({s, m, kWeight});
        ++mine.weights_ready;
        mine.pending_bytes += stored;
      } else {
        mine.held -= stored;
      }
      if (s > 0) {
        const i64 at = end + hop<kLinear>(s - 1, m);
        gradient_arrives<kPieces>(track, s - 1, m, at);
        wake(s - 1, at);
      }
      if (!is_short) mine.wants_forward = policy.rhythm > 0;
    } else {
      mine.held -= stored;
      mine.pending_bytes -= stored;
    }
    return end;
  }

  bool is_on_short(int s) const { return !machine_.is_short.empty() && machine_.is_short[s]; }

  template <bool kLinear>
  i64 hop(int low, int m) const {
    const bool crosses = kLinear || machine_.stage_rank[low] != machine_.stage_rank[low + 1];
    return crosses ? cost(kTransfer, low, m) : 0;
  }

  template <bool kPieces>
  void gradient_arrives(Track& track, int s, int m, i64 at) {
    track.gradient_at[m * machine_.stages + s] = at;
    if (nth_gradient<kPieces>(stage_[s].gradients_started) == m) stage_[s].gradient_at = at;
  }

  void wake(int s, i64 at) {
    RankState& theirs = rank_[machine_.stage_rank[s]];
    theirs.wake = std::min(theirs.wake, std::max(at, theirs.free_at));
  }

  bool linear_ = true;
  int count_ = 0;
  Moment now_{};
  std::vector<i64> work_, tail_;     // [rank]: of all positions; the way back from it of the last gradient
  std::vector<i64> pieces_later_;    // [rank]: see `Way`, of all pieces
};

}  // namespace dynapipe
