// What one pass of a dispatch policy is given, and what it leaves.
#pragma once

#include "pieces.hpp"

namespace dynapipe {

// A micro-batch on a rank: its work there, the least time before the rank's first stage (down) and after it (up), the
// most working bytes there, and what it stores there on other stages than the first (later).
struct Way {
  i64 work, down, up, working, later;
};

// What all pipelines of a plan share.
struct Machine {
  int stages = 0, ranks = 0;
  bool split = false;                         // the gradient is I alone and W follows; else it is the whole B
  bool working_in_backward = true;            // working bytes are needed in B and I, too
  std::vector<int> stage_rank;                // [stage]
  std::vector<std::vector<int>> rank_stages;  // [rank], ascending
  std::vector<char> is_short;                 // [stage]: what is ready there goes first; empty: no stage is
  std::vector<i64> free_bytes;                // [rank]: limit - static

  // Writes the ways [rank] of one record.
  void measure(const i64* record, Way* ways) const {
    i64 down = 0, up = 0;
    std::fill(ways, ways + ranks, Way{});
    for (int s = 0; s < stages; ++s) {
      const int r = stage_rank[s];
      const i64* const cost = record + s * kFields;
      if (s == rank_stages[r].front()) {
        ways[r].down = down;
        ways[r].up = split ? 0 : up;  // a W may come last
      } else {
        ways[r].later += cost[kStored];
      }
      ways[r].working = std::max(ways[r].working, cost[kWorking]);
      ways[r].work += cost[kForward] + cost[kGradient] + (split ? cost[kWeight] : 0);
      const bool crosses = s + 1 < stages && stage_rank[s + 1] != r;
      down += cost[kForward] + (crosses ? cost[kTransfer] : 0);
      up += cost[kGradient] + (crosses ? cost[kTransfer] : 0);
    }
  }
};

// How a rank that is free chooses among what is ready.
struct DispatchPolicy {
  int extra = 0;          // stage s holds at most S - s + extra micro-batches; kNoCap: as many as memory allows
  int rhythm = 1;         // 1: after a backward a forward goes first; 2: always, and is waited for: 1F1B's order
  int patience = 0;       // a W may delay the next known arrival by up to patience / 4 of its own time
};
constexpr int kNoCap = 1 << 20;

struct Chosen {
  int stage, position;
  Field kind;  // kForward, kGradient or kWeight
};

// How far a pass has come, on each stage and on each rank.
struct StageState {
  int forwards_started, gradients_started;
  i64 forward_at, gradient_at;  // when the next one's input arrives; kNever: not known yet, or there is none
};
struct RankState {
  i64 wake, free_at, held, pending_bytes, worked;
  int weights_ready, weights_done;
  bool wants_forward;
};
struct Moment {
  int done;
  i64 makespan;
};

// A pass of a policy. The pass of a similar order can begin where the two orders part.
struct Track {
  std::vector<const i64*> records;           // [position]: costs, [stage][field]
  std::vector<const Way*> ways;              // [position]: [rank]
  std::vector<int> sample_of;                 // [position]: the cut sample that it is a piece of, or -1
  GradientOrder gradients;
  const DispatchPolicy* policy = nullptr;
  std::vector<i64> forward_at, gradient_at;  // [position][stage]: when the input arrives; kNever: not known yet
  std::vector<std::vector<Chosen>> weights;  // [rank]: W's in the order in which they became ready
  bool keeps_sequence = false;
  std::vector<Chosen> sequence;              // all actions as they started, if they are kept
  // States as each position is about to enter stage 0.
  std::vector<StageState> stages;            // [position][stage]
  std::vector<RankState> ranks;              // [position][rank]
  std::vector<Moment> moments;               // [position]
};

}  // namespace dynapipe
