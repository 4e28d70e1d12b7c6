// What the ranks of one replica hold as its micro-batches come and go, and whether they have memory for one more.
#pragma once

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

  template <bool kPieces>
  i64 taken(int s, int m) const {
    return kPieces ? needs_.taken[m * machine_.stages + s] : cost(kStored, s, m);
  }
  // The position whose gradient runs as the k-th, and the place of a position in that order.
  template <bool kPieces>
  int nth_gradient(int k) const {
    return kPieces ? gradients_->order[k] : k;
  }
  int place_of(int m) const { return gradients_->empty ? m : gradients_->place[m]; }

  // Whether the rank has memory for position m on stage s now. `only_pending`: it will have once the pending W's have run.
  template <bool kLinear, bool kPieces>
  bool admits(int r, int s, int m, bool* only_pending) {
    const int stages = kLinear ? 1 : static_cast<int>(machine_.rank_stages[r].size());
    const i64 room = machine_.free_bytes[r], fresh = rank_[r].held + taken<kPieces>(s, m);
    i64 most_working = ready<kPieces>(s, m);
    if (fresh + most_working - rank_[r].pending_bytes > room) return false;
    if (fresh + most_later_[r] + most_working_[r] <= room) return true;  // whatever runs next
    if (machine_.working_in_backward) {
      const bool in_turn = !machine_.split && stages == 1 && !kPieces;  // then what is older has gone when a backward runs
      for (int k = 0; k < stages; ++k) {
        const int t = kLinear ? r : machine_.rank_stages[r][k];
        i64 gone = 0;
        each_inside<kPieces>(t, [&](int q) {
          most_working = std::max(most_working, ready<kPieces>(t, q) - gone);
          if (in_turn) gone += cost(kStored, t, q);
        });
      }
    }
    const i64 needed = fresh + most_working;
    if (needed - rank_[r].pending_bytes > room) return false;
    if (stages > 1 && !(kPieces ? can_complete_with_pieces(r, s, m) : can_complete(r, s, m))) return false;
    if (needed <= room) return true;
    *only_pending = true;
    return false;
  }

  Machine machine_;
  const i64* const* records_ = nullptr;
  const GradientOrder* gradients_ = nullptr;
  PieceNeeds needs_;
  std::vector<StageState> stage_;
  std::vector<RankState> rank_;
  std::vector<i64> most_working_, most_later_;  // [rank]: of all positions; of whole ones, and all pieces together

 private:
  template <bool kPieces>
  i64 ready(int s, int m) const {
    return kPieces ? needs_.ready[m * machine_.stages + s] : cost(kWorking, s, m);
  }

  // Several stages on a rank: whether, after this admission, the micro-batches in flight can still complete, one after the
  // other, oldest first. Those that are on all stages need no more than now; of the others the youngest leave the most room.
  bool can_complete(int r, int s, int m) const {
    const auto entered = [&](int t) { return stage_[t].forwards_started + (t == s); };
    const std::vector<int>& mine = machine_.rank_stages[r];
    const int end = std::max(stage_[mine.front()].forwards_started, s == mine.front() ? m + 1 : 0);
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

  bool can_complete_with_pieces(int r, int s, int m) {
    const int lowest = machine_.rank_stages[r].front();
    i64 held = rank_[r].held - rank_[r].pending_bytes + taken<true>(s, m);
    const int begin = oldest(lowest, m), end = std::max(stage_[lowest].forwards_started, s == lowest ? m + 1 : 0);
    find_lasting(r, s, m, begin, end);
    for (int q = begin; q < end; ++q) {
      i64 mine = 0, missing = 0, coming = 0;
      const bool ends = gradients_->last[q] == q;
      for (int t : machine_.rank_stages[r]) {
        if (q >= stage_[t].forwards_started && !(t == s && q == m)) {
          missing += taken<true>(t, q);
          coming = std::max(coming, ready<true>(t, q));
        }
        if (!ends) continue;
        for (int p = gradients_->first[q]; p <= q; ++p) {
          if (gradients_->last[p] == q && gradients_->place[p] >= stage_[t].gradients_started) mine += cost(kStored, t, p);
        }
      }
      if (held + missing + std::max(lasting_[q - begin], coming) > machine_.free_bytes[r]) return false;
      held += missing - mine;
      if (!machine_.working_in_backward) continue;
      for (int later = q + 1; later < std::min(gradients_->last[q] + 1, end); ++later) {  // pieces stay inside while others come and go
        lasting_[later - begin] = std::max(lasting_[later - begin], coming);
      }
    }
    return true;
  }

  // `lasting_` [position - begin]: the most working bytes, while it completes, of the micro-batches that are inside and
  // have not completed before it.
  void find_lasting(int r, int s, int m, int begin, int end) {
    lasting_.assign(end - begin, 0);
    if (!machine_.working_in_backward) return;
    const auto stays = [&](int t, int p) {
      i64& most = lasting_[std::min(gradients_->last[p], end - 1) - begin];
      most = std::max(most, ready<true>(t, p));
    };
    stays(s, m);
    for (int t : machine_.rank_stages[r]) each_inside<true>(t, [&](int p) { stays(t, p); });
    for (std::size_t k = lasting_.size(); k-- > 1;) lasting_[k - 1] = std::max(lasting_[k - 1], lasting_[k]);
  }

  // Positions whose forward has started on a stage and whose gradient has not, in the gradient order.
  template <bool kPieces, typename Visit>
  void each_inside(int s, Visit visit) const {
    int inside = stage_[s].forwards_started - stage_[s].gradients_started;
    for (int back = stage_[s].gradients_started; inside > 0; ++back) {
      const int q = nth_gradient<kPieces>(back);
      if (kPieces && q >= stage_[s].forwards_started) continue;
      visit(q);
      --inside;
    }
  }

  // The first position whose forward has started on a stage and whose gradient has not; m if there is none.
  int oldest(int s, int m) const {
    for (int q = 0; q < stage_[s].forwards_started; ++q) {
      if (gradients_->place[q] >= stage_[s].gradients_started) return q;
    }
    return m;
  }

  std::vector<i64> lasting_;  // see find_lasting
};

}  // namespace dynapipe
