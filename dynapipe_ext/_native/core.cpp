// The hot loops of planning, for Python: every function checks its arguments and calls its header.
#include "arguments.hpp"
#include "judge.hpp"
#include "levelling.hpp"
#include "program_calls.hpp"
#include "regroup.hpp"
#include "search.hpp"
#include "splits.hpp"

namespace dynapipe {
namespace {

using Ranges = std::vector<std::pair<int, int>>;
using Cuts = std::vector<std::tuple<int, int, int>>;
using Actions = std::vector<std::vector<std::vector<i64>>>;  // [replica][rank]

Machine make_machine(std::vector<int> stage_ranks, bool split) {
  Machine machine;
  machine.stages = static_cast<int>(stage_ranks.size());
  for (int rank : stage_ranks) machine.ranks = std::max(machine.ranks, rank + 1);
  machine.rank_stages.resize(machine.ranks);
  for (int s = 0; s < machine.stages; ++s) machine.rank_stages.at(stage_ranks[s]).push_back(s);
  machine.stage_rank = std::move(stage_ranks);
  machine.split = split;
  return machine;
}

Machine read_machine(const Fields& problem) {
  Machine machine = make_machine(problem.get<std::vector<int>>("stage_ranks"), problem.get<bool>("split"));
  machine.free_bytes = problem.get<std::vector<i64>>("free_bytes");
  require(machine.free_bytes.size() == machine.rank_stages.size(), "every rank has its free bytes");
  machine.working_in_backward = problem.get<bool>("working_in_backward");
  const auto short_stages = problem.get<std::vector<int>>("short_stages");
  if (!short_stages.empty()) machine.is_short.assign(machine.stages, 0);
  for (int s : short_stages) machine.is_short.at(s) = 1;
  return machine;
}

Costs make_costs(const Table<i64, 4>& records, const Table<int, 2>& shapes, std::size_t stages) {
  require_shape({records.shape(0), records.shape(1), stages, kFields}, records);
  Costs costs;
  costs.kinds = static_cast<int>(records.shape(0));
  costs.shapes = static_cast<int>(records.shape(1));
  costs.items = static_cast<int>(shapes.shape(0));
  costs.width = static_cast<int>(shapes.shape(1));
  costs.records = records.data();
  costs.shape = shapes.data();
  return costs;
}

// Adds which items are pieces of one sample.
void read_pieces(const Fields& problem, Costs& costs) {
  costs.sample_pieces = problem.get<Groups>("sample_pieces");
  costs.sample_of.assign(costs.items, -1);
  require(costs.sample_pieces.empty() || costs.width == 1, "pieces are items that cannot be cut");
  require_items(costs.sample_pieces, costs.items);
  for (std::size_t sample = 0; sample < costs.sample_pieces.size(); ++sample) {
    for (int item : costs.sample_pieces[sample]) costs.sample_of[item] = static_cast<int>(sample);
  }
}

// Checks that cuts cover the items in turn.
template <typename CutsOrRanges>
void require_in_turn(const CutsOrRanges& cuts, std::size_t items) {
  int item = 0;
  for (const auto& cut : cuts) {
    require(std::get<0>(cut) == item && std::get<1>(cut) > item, "cuts must cover the items in turn");
    item = std::get<1>(cut);
  }
  require(static_cast<std::size_t>(item) == items, "cuts must cover the items in turn");
}

// Searches a `Problem` from cuts (first item, end, kind) and from orders of them of each replica. Returns the cuts, those
// of each replica in injection order, makespans, and actions as (kind x stages + stage) x count + position, with
// kind 0 F, 1 gradient, 2 W.
std::tuple<Cuts, Groups, std::vector<i64>, Actions> search(nb::handle problem_object, const Cuts& cuts, const std::vector<Groups>& orders,
                                                           nb::handle schedule_object, bool with_actions) {
  const Fields problem(problem_object), schedule(schedule_object);
  const auto records = problem.get<Table<i64, 4>>("records");
  const auto shapes = problem.get<Table<int, 2>>("shapes");
  const Machine machine = read_machine(problem);
  Costs costs = make_costs(records, shapes, machine.stage_rank.size());
  read_pieces(problem, costs);
  std::vector<DispatchPolicy> policies;
  for (auto [extra, rhythm, patience] : problem.get<std::vector<std::tuple<int, int, int>>>("policies")) {
    policies.push_back({extra, rhythm, patience});
  }
  SharedCores cores;
  if (const nb::object shared = problem.get<nb::object>("cores"); !shared.is_none()) {
    cores = {Fields(shared).get_number("tp", 1), Fields(shared).get_number("num_cores", 1)};
  }
  const auto [spread, most] = problem.get<std::pair<i64, i64>>("noise");
  require(spread >= 0 && most >= 0 && spread < Disturbances::kScale, "times are disturbed by a part of themselves");
  const AnnealingSchedule walk{PyLong_AsUnsignedLongLongMask(schedule.get<nb::int_>("seed").ptr()), schedule.get_number("moves", 0),
                  schedule.get_number("begun", 0), schedule.get_number("cooling", 1)};
  require_in_turn(cuts, shapes.shape(0));
  State state;
  for (auto [first, end, kind] : cuts) {
    require(kind >= 0 && static_cast<std::size_t>(kind) < records.shape(0), "a cut has a kind without records");
    state.cuts.push_back({first, end, kind});
  }
  for (const auto& replica : orders) {
    require(!replica.empty(), "a replica has no order to start from");
    require_items(replica, cuts.size());
  }
  Search job(std::move(costs), machine, std::move(policies), problem.get<bool>("equal_counts"), cores, spread, most);
  Actions actions;
  {
    nb::gil_scoped_release unlocked;
    const int replicas = static_cast<int>(orders.size());
    state.groups.resize(replicas);
    state.policy.assign(replicas, 0);
    state.makespan.assign(replicas, 0);
    bool possible = true;
    for (int d = 0; d < replicas; ++d) {
      job.settle(state, d, orders[d]);
      possible = possible && state.makespan[d] < kNever;
    }
    if (possible) state = job.improve(std::move(state), walk);
    for (int d = 0; possible && with_actions && d < replicas; ++d) {
      Track track;
      track.keeps_sequence = true;
      job.run(state, d, kNever, track, nullptr);
      const i64 count = static_cast<i64>(state.groups[d].size());
      auto& ranks = actions.emplace_back(machine.ranks);
      for (const auto& c : track.sequence) {
        ranks[machine.stage_rank[c.stage]].push_back((static_cast<i64>(c.kind) * machine.stages + c.stage) * count + c.position);
      }
    }
  }
  Cuts found;
  for (const auto& cut : state.cuts) found.emplace_back(cut.first, cut.end, cut.kind);
  return {found, state.groups, state.makespan, actions};
}

// Returns cuts (first < 0: merged away) and groups of cuts after these moves.
std::pair<Ranges, Groups> levelled(const Table<i64, 4>& records, const std::vector<int>& stage_ranks, bool split, const Table<int, 2>& shapes,
                                   const Ranges& cuts, const Groups& groups, i64 moves, std::uint64_t seed, bool equal_counts) {
  require_in_turn(cuts, shapes.shape(0));
  require_items(groups, cuts.size());
  std::vector<int> times_held(cuts.size(), 0);
  for (const auto& group : groups) {
    for (int m : group) require(times_held[m]++ == 0, "a cut is in two groups");
  }
  State state{{}, groups, std::vector<int>(groups.size(), 0), std::vector<i64>(groups.size(), 0)};
  for (auto [first, end] : cuts) state.cuts.push_back({first, end, 0});
  state = Levelling(make_machine(stage_ranks, split), make_costs(records, shapes, stage_ranks.size()), equal_counts).improve(std::move(state), moves, seed);
  Ranges ranges;
  for (const auto& cut : state.cuts) ranges.emplace_back(cut.first, cut.end);
  return {ranges, state.groups};
}

// Returns interpolated values [column][place] of a grid, and which places it knows; `places` [axis][place].
auto interpolate(const std::vector<Table<double, 1>>& axes, const Table<double, 2>& values, const Table<bool, 1>& known,
                 const Table<double, 2>& places) {
  Grid grid;
  for (const auto& axis : axes) grid.axes.emplace_back(axis.data(), axis.data() + axis.size());
  const std::size_t columns = values.shape(0), count = places.shape(1), points = grid.num_points();
  require(points > 0 && axes.size() <= Grid::kMost, "a grid has no points, or too many axes");
  require_shape({columns, points}, values);
  require_shape({points}, known);
  require_shape({axes.size(), count}, places);
  std::vector<double> at(columns * count);
  std::vector<char> is_known(count);
  {
    nb::gil_scoped_release unlocked;
    grid.interpolate(values.data(), columns, known.data(), places.data(), count, at.data(), is_known.data());
  }
  return std::pair{make_array<double, 2>(std::move(at), {columns, count}), make_array<bool, 1>(std::move(is_known), {count})};
}

CutCosts read_cut_costs(const Table<i64, 2>& costs, const Table<int, 1>& widths) {
  require_shape({costs.shape(0)}, widths);
  for (std::size_t k = 0; k < widths.size(); ++k) {
    require(widths(k) >= 1 && static_cast<std::size_t>(widths(k)) <= costs.shape(1), "a width is outside the costs");
  }
  return {costs.data(), static_cast<int>(costs.shape(0)), static_cast<int>(costs.shape(1)), widths.data()};
}

// Returns the sum of the cheapest cuts under every bound, and their ends.
auto cheapest_cuts(const Table<i64, 2>& costs, const Table<int, 1>& widths, const std::vector<i64>& bounds) {
  std::vector<std::pair<i64, std::vector<int>>> found;
  for (i64 bound : bounds) found.push_back(find_cheapest_cuts(read_cut_costs(costs, widths), bound));
  return found;
}

i64 least_bound(const Table<i64, 2>& costs, const Table<int, 1>& widths) { return find_least_bound(read_cut_costs(costs, widths)); }

Groups regrouped(const Groups& groups, const std::vector<i64>& encoder, const std::vector<i64>& decoder,
                 const std::array<double, 6>& law, i64 most_tokens, i64 moves, std::uint64_t seed) {
  require(encoder.size() == decoder.size(), "an item has a length on each side");
  require(groups.size() > 1, "there are 2 groups or more");
  require_items(groups, encoder.size());
  for (const auto& group : groups) require(!group.empty(), "a group is empty");
  return Regrouping(groups, encoder, decoder, law, most_tokens).after(moves, seed);
}

i64 preemptive_ns(const Table<i64, 1>& heads, const Table<i64, 1>& durations, const Table<i64, 1>& tails) {
  require_shape({heads.size()}, durations, tails);
  return bound_machine_ns(heads.data(), durations.data(), tails.data(), heads.size());
}

}  // namespace
}  // namespace dynapipe

NB_MODULE(_core, module) {
  using namespace dynapipe;
  const nb::call_guard<nb::gil_scoped_release> unlocked;
  module.doc() = "Hot loops of planning";
  module.def("search", &search);
  module.def("interpolate", &interpolate);
  module.def("levelled", &levelled, unlocked);
  module.def("regrouped", &regrouped, unlocked);
  module.def("cheapest_cuts", &cheapest_cuts, unlocked);
  module.def("least_bound", &least_bound, unlocked);
  module.def("preemptive_ns", &preemptive_ns, unlocked);
  programs::bind_programs(module);
}
