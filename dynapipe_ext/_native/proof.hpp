// Proof that the ranks of one replica cannot hang, of their instructions as rows of integers. executor/proof.py says what
// is wrong with those that can.
#pragma once

#include <optional>

#include "programs.hpp"

namespace dynapipe::programs {

struct Rows {
  const Instruction* first;
  std::size_t count;
};

struct Replica {
  std::vector<int> stage_ranks;
  int count;  // of micro-batches
  bool forward_only;
  std::vector<int> before, behind;  // the piece next to a micro-batch's of the same sample, or -1
  std::vector<i64> spec_bytes;
};

struct Transfer {
  int key, peer, channel, specs;
  bool is_send;
};

// What a rank posts, in program order, and the largest sum of bytes in flight.
struct Posted {
  std::vector<Transfer> transfers;
  i64 peak_bytes = 0;
};

// One rank by itself.
class RankProof {
 public:
  RankProof(const Replica& replica, int rank)
      : replica_(replica), rank_(rank), stages_(static_cast<int>(replica.stage_ranks.size())), count_(replica.count), loaded_(count_, 0),
        progress_(static_cast<std::size_t>(stages_) * count_, kNothing), present_(2 * progress_.size(), -1), sending_(present_),
        receiving_(present_) {}

  // Returns what the rank posts, or nothing if something is wrong.
  std::optional<Posted> run(const Rows& rows) && {
    for (std::size_t i = 0; i < rows.count; ++i) {
      if (!step(rows.first[i])) return std::nullopt;
    }
    if (!is_whole()) return std::nullopt;
    return std::move(posted_);
  }

 private:
  enum Progress : char { kNothing, kForwarded, kHalf, kDone };

  bool step(const Instruction& row) {
    if (row.micro_batch < 0 || row.micro_batch >= count_) return false;
    if (row.letter == kLoad) return !std::exchange(loaded_[row.micro_batch], true);
    if (row.stage < 0 || row.stage >= stages_) return false;
    switch (row.letter) {
      case kSend:
      case kRecv: return transfer(row);
      case kWaitSend: return wait(row, sending_);
      case kWaitRecv: return wait(row, receiving_);
      default: return replica_.stage_ranks[row.stage] == rank_ && compute(row);
    }
  }

  int key_of(const Instruction& row) const { return 2 * place(row.stage, row.micro_batch) + (row.is_gradient != 0); }
  int place(int stage, int micro_batch) const { return stage * count_ + micro_batch; }

  bool transfer(const Instruction& row) {
    const int key = key_of(row);
    const bool is_send = row.letter == kSend;
    if (row.specs < 0 || row.specs >= static_cast<int>(replica_.spec_bytes.size()) || row.peer == rank_) return false;
    const i64 bytes = replica_.spec_bytes[row.specs];
    if (is_send) {
      if (sending_[key] >= 0 || present_[key] < 0) return false;
      present_[key] = -1;
      sending_[key] = bytes;
    } else {
      if (receiving_[key] >= 0 || present_[key] >= 0) return false;
      receiving_[key] = bytes;
    }
    posted_.transfers.push_back({key, row.peer, row.channel, row.specs, is_send});
    held_bytes_ += bytes;
    posted_.peak_bytes = std::max(posted_.peak_bytes, held_bytes_);
    return true;
  }

  bool wait(const Instruction& row, std::vector<i64>& moving) {
    const int key = key_of(row);
    const i64 bytes = std::exchange(moving[key], -1);
    if (bytes < 0) return false;
    if (row.letter == kWaitSend) held_bytes_ -= bytes;
    else present_[key] = bytes;
    return true;
  }

  bool compute(const Instruction& row) {
    const int stage = row.stage, m = row.micro_batch, here = place(stage, m);
    if (row.letter == kBackwardWeight) return std::exchange(progress_[here], kDone) == kHalf;
    const bool is_forward = row.letter == kForward;
    if (!is_forward && row.letter != kBackward && row.letter != kBackwardInput) return false;
    if (is_forward ? !loaded_[m] : replica_.forward_only) return false;
    if (progress_[here] != (is_forward ? kNothing : kForwarded)) return false;
    const int neighbour = (is_forward ? replica_.before : replica_.behind)[m];
    if (neighbour >= 0 && progress_[place(stage, neighbour)] < (is_forward ? kForwarded : kHalf)) return false;
    const int from = is_forward ? stage - 1 : stage + 1, to = is_forward ? stage + 1 : stage - 1;
    if (from >= 0 && from < stages_ && !take(2 * place(from, m) + !is_forward)) return false;
    progress_[here] = is_forward ? kForwarded : row.letter == kBackward ? kDone : kHalf;
    if (to >= 0 && to < stages_) present_[2 * here + !is_forward] = 0;
    return true;
  }

  bool take(int key) {
    const i64 bytes = std::exchange(present_[key], -1);
    held_bytes_ -= std::max<i64>(bytes, 0);
    return bytes >= 0;
  }

  bool is_whole() const {
    const auto is_left = [](i64 bytes) { return bytes >= 0; };
    for (const auto* one : {&present_, &sending_, &receiving_}) {
      if (std::any_of(one->begin(), one->end(), is_left)) return false;
    }
    for (int stage = 0; stage < stages_; ++stage) {
      for (int m = 0; m < count_ && replica_.stage_ranks[stage] == rank_; ++m) {
        if (progress_[place(stage, m)] != (replica_.forward_only ? kForwarded : kDone)) return false;
      }
    }
    return std::all_of(loaded_.begin(), loaded_.end(), [](char one) { return one; });
  }

  const Replica& replica_;
  const int rank_, stages_, count_;
  Posted posted_;
  i64 held_bytes_ = 0;
  std::vector<char> loaded_;  // micro-batches
  std::vector<Progress> progress_;
  std::vector<i64> present_, sending_, receiving_;  // by key: bytes, or -1
};

// Checks that ranks that post their transfers one at a time all reach their end, each transfer as a send and a receive of
// one buffer with one shape on one channel. Then both sides of every queue have the same transfers in the same order.
inline bool meet_in_one_order(const std::vector<Posted>& ranks, std::size_t num_keys) {
  std::vector<std::size_t> done(ranks.size(), 0);
  std::vector<int> first_side(num_keys, -1), moving;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) moving.push_back(static_cast<int>(rank));
  while (!moving.empty()) {
    const int rank = moving.back();
    moving.pop_back();
    while (done[rank] < ranks[rank].transfers.size()) {
      const Transfer& mine = ranks[rank].transfers[done[rank]];
      const int other = std::exchange(first_side[mine.key], -1);
      if (other < 0) {
        first_side[mine.key] = rank;
        break;
      }
      const Transfer& theirs = ranks[other].transfers[done[other]];
      if (mine.peer != other || theirs.peer != rank || mine.channel != theirs.channel || mine.specs != theirs.specs || mine.is_send == theirs.is_send) {
        return false;
      }
      ++done[rank];
      ++done[other];
      moving.push_back(other);
    }
  }
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    if (done[rank] < ranks[rank].transfers.size()) return false;
  }
  return true;
}

// Returns the peak bytes of buffers in flight of each rank; nothing if something is wrong.
inline std::optional<std::vector<i64>> peaks_of_proven(const Replica& replica, const std::vector<Rows>& programs) {
  std::vector<Posted> ranks;
  std::vector<i64> peaks;
  for (std::size_t rank = 0; rank < programs.size(); ++rank) {
    auto posted = RankProof(replica, static_cast<int>(rank)).run(programs[rank]);
    if (!posted) return std::nullopt;
    peaks.push_back(posted->peak_bytes);
    ranks.push_back(std::move(*posted));
  }
  if (!meet_in_one_order(ranks, 2 * replica.stage_ranks.size() * replica.count)) return std::nullopt;
  return peaks;
}

}  // namespace dynapipe::programs
