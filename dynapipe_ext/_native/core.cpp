// The hot loops of planning for Python. Every function has a twin in Python that gives the same numbers.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <tuple>

#include "search.hpp"

namespace nb = nanobind;
using dynapipe::i64;

namespace {

using Table = nb::ndarray<const i64, nb::c_contig, nb::device::cpu>;
using Groups = std::vector<std::vector<int>>;

std::vector<i64> values(const Table& table, std::size_t size, const char* name) {
  if (table.size() != size) throw std::invalid_argument(std::string(name) + " has another size than its table");
  return {table.data(), table.data() + table.size()};
}

// (groups, kind of each micro-batch, rule and makespan of each replica, actions [replica][rank] as
//  (letter x stages + stage) x micro-batches + micro-batch with letter 0 F, 1 gradient, 2 W)
using Result = std::tuple<Groups, std::vector<int>, std::vector<int>, std::vector<i64>, std::vector<std::vector<std::vector<i64>>>>;

Result search(int kinds, int stages, int count, const Table& forward, const Table& gradient, const Table& weight,
              const Table& stored, const Table& working, const Table& transfer, const std::vector<int>& stage_rank,
              const std::vector<i64>& free_bytes, bool split, bool working_in_backward,
              const std::vector<std::tuple<int, bool, int, int>>& rules, const std::vector<Groups>& starts,
              const std::vector<int>& kind, i64 effort, std::uint64_t seed,
              bool equal_counts) {
  const std::size_t cells = static_cast<std::size_t>(kinds) * stages * count;
  dynapipe::Costs costs;
  costs.kinds = kinds;
  costs.stages = stages;
  costs.count = count;
  costs.forward = values(forward, cells, "forward");
  costs.gradient = values(gradient, cells, "gradient");
  costs.weight = values(weight, cells, "weight");
  costs.stored = values(stored, cells, "stored");
  costs.working = values(working, cells, "working");
  costs.transfer = values(transfer, static_cast<std::size_t>(std::max(0, stages - 1)) * count, "transfer");
  dynapipe::Pipeline frame;
  frame.stages = stages;
  frame.ranks = static_cast<int>(free_bytes.size());
  frame.split = split;
  frame.working_in_backward = working_in_backward;
  frame.stage_rank = stage_rank;
  frame.free_bytes = free_bytes;
  frame.rank_stages.resize(frame.ranks);
  for (int s = 0; s < stages; ++s) frame.rank_stages.at(stage_rank.at(s)).push_back(s);
  std::vector<dynapipe::Rule> chosen_rules;
  for (auto [extra, alternate, patience, most_pending] : rules) {
    chosen_rules.push_back({extra, alternate, patience, most_pending});
  }
  for (const auto& replica : starts) {
    for (const auto& order : replica) {
      for (int m : order) {
        if (m < 0 || m >= count) throw std::invalid_argument("a start order names a micro-batch outside the tables");
      }
    }
  }
  dynapipe::State state;
  std::vector<std::vector<std::vector<i64>>> actions;
  {
    nb::gil_scoped_release unlocked;
    dynapipe::Search job(std::move(costs), std::move(frame), std::move(chosen_rules));
    const int replicas = static_cast<int>(starts.size());
    state.groups.resize(replicas);
    state.kind = kind;
    state.rule.assign(replicas, 0);
    state.makespan.assign(replicas, 0);
    bool runs = true;
    for (int d = 0; d < replicas; ++d) {
      job.settle(state, d, starts[d]);
      runs = runs && state.makespan[d] < dynapipe::kNever;
      if (state.makespan[d] >= dynapipe::kNever) state.groups[d] = starts[d].front();
    }
    if (runs) state = job.improve(std::move(state), effort, seed, equal_counts);
    for (int d = 0; runs && d < replicas; ++d) {
      std::vector<std::vector<dynapipe::Chosen>> orders;
      job.run(state.groups[d], state.kind, state.rule[d], dynapipe::kNever, &orders);
      auto& replica = actions.emplace_back();
      for (const auto& rank : orders) {
        auto& codes = replica.emplace_back();
        for (const auto& c : rank) {
          codes.push_back((static_cast<i64>(c.kind) * stages + c.stage) * count + state.groups[d][c.position]);
        }
      }
    }
  }
  return {state.groups, state.kind, state.rule, state.makespan, actions};
}

}  // namespace

NB_MODULE(_core, module) {
  module.doc() = "Hot loops of planning; the twins in Python are the reference";
  module.def("search", &search);
}
