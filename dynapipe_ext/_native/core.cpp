// The hot loops of planning, for Python.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <tuple>

#include "arguments.hpp"
#include "balance.hpp"
#include "judge.hpp"
#include "levelling.hpp"
#include "program_calls.hpp"
#include "regroup.hpp"
#include "search.hpp"
#include "splits.hpp"

namespace nb = nanobind;
using dynapipe::i64;

namespace {

using Records = nb::ndarray<const i64, nb::ndim<4>, nb::c_contig, nb::device::cpu>;
using Shapes = nb::ndarray<const int, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Groups = std::vector<std::vector<int>>;
using Cuts = std::vector<std::tuple<int, int, int>>;

// (cuts as (first item, end, kind), groups of cuts in injection order, rule and makespan of each replica,
//  actions [replica][rank] as (letter x stages + stage) x count + position with letter 0 F, 1 gradient, 2 W)
using Result = std::tuple<Cuts, Groups, std::vector<int>, std::vector<i64>, std::vector<std::vector<std::vector<i64>>>>;

Result search(const Records& records, const Shapes& shapes, const std::vector<int>& stage_rank,
              const std::vector<i64>& free_bytes, const std::vector<int>& short_stages, bool split, bool working_in_backward,
              const std::vector<std::tuple<int, int, int, int>>& rules, const Cuts& cuts,
              const std::vector<Groups>& starts, const std::tuple<std::uint64_t, i64, i64, i64>& walk, bool equal_counts,
              const std::pair<i64, i64>& shared, const Groups& sample_pieces, const std::pair<i64, i64>& noise, bool with_actions) {
  dynapipe::Costs costs;
  costs.kinds = static_cast<int>(records.shape(0));
  costs.shapes = static_cast<int>(records.shape(1));
  costs.items = static_cast<int>(shapes.shape(0));
  costs.width = static_cast<int>(shapes.shape(1));
  costs.records = records.data();
  costs.shape = shapes.data();
  costs.sample_pieces = sample_pieces;
  costs.sample_of.assign(costs.items, -1);
  for (std::size_t sample = 0; sample < sample_pieces.size(); ++sample) {
    for (int item : sample_pieces[sample]) {
      if (item < 0 || item >= costs.items || costs.width != 1) throw std::invalid_argument("pieces are items that cannot be cut");
      costs.sample_of[item] = static_cast<int>(sample);
    }
  }
  dynapipe::Machine machine;
  machine.stages = static_cast<int>(stage_rank.size());
  machine.ranks = static_cast<int>(free_bytes.size());
  if (records.shape(3) != dynapipe::kFields || records.shape(2) != stage_rank.size()) {
    throw std::invalid_argument("records have another number of fields or stages than the placement");
  }
  machine.split = split;
  machine.working_in_backward = working_in_backward;
  machine.stage_rank = stage_rank;
  machine.free_bytes = free_bytes;
  machine.rank_stages.resize(machine.ranks);
  for (int s = 0; s < machine.stages; ++s) machine.rank_stages.at(stage_rank.at(s)).push_back(s);
  if (!short_stages.empty()) machine.is_short.assign(machine.stages, 0);
  for (int s : short_stages) machine.is_short.at(s) = 1;
  std::vector<dynapipe::Rule> chosen_rules;
  for (auto [extra, rhythm, patience, most_pending] : rules) {
    chosen_rules.push_back({extra, rhythm, patience, most_pending});
  }
  const auto [seed, moves, begun, cooling] = walk;
  if (moves < 0 || begun < 0 || cooling < 1) throw std::invalid_argument("a walk has no negative moves, and cools after at least one");
  if (shared.first < 0 || shared.second < 1) throw std::invalid_argument("cores that ranks share must be at least one");
  const auto [spread, most] = noise;
  if (spread < 0 || most < 0 || spread >= dynapipe::Disturbances::kScale) throw std::invalid_argument("times are disturbed by a part of themselves");
  dynapipe::State state;
  int item = 0;
  for (auto [first, end, kind] : cuts) {
    if (first != item || end <= first || end > costs.items || kind < 0 || kind >= costs.kinds) {
      throw std::invalid_argument("cuts must cover the items in turn, each of a kind that the records have");
    }
    state.cuts.push_back({first, end, kind});
    item = end;
  }
  for (const auto& replica : starts) {
    if (replica.empty()) throw std::invalid_argument("a replica has no order to start from");
    for (const auto& order : replica) {
      for (int m : order) {
        if (m < 0 || m >= static_cast<int>(cuts.size())) throw std::invalid_argument("a start order names no cut");
      }
    }
  }
  std::vector<std::vector<std::vector<i64>>> actions;
  {
    nb::gil_scoped_release unlocked;
    dynapipe::Search job(costs, std::move(machine), std::move(chosen_rules), equal_counts,
                         {shared.first, shared.second}, spread, most);
    const int replicas = static_cast<int>(starts.size());
    state.groups.resize(replicas);
    state.rule.assign(replicas, 0);
    state.makespan.assign(replicas, 0);
    bool possible = true;
    for (int d = 0; d < replicas; ++d) {
      job.settle(state, d, starts[d]);
      possible = possible && state.makespan[d] < dynapipe::kNever;
    }
    if (possible) state = job.improve(std::move(state), {seed, moves, begun, cooling});
    for (int d = 0; possible && with_actions && d < replicas; ++d) {
      dynapipe::Track track;
      track.keeps_sequence = true;
      job.run(state, d, dynapipe::kNever, track, nullptr);
      const i64 count = static_cast<i64>(state.groups[d].size());
      auto& ranks = actions.emplace_back(free_bytes.size());
      for (const auto& c : track.sequence) {
        ranks[stage_rank[c.stage]].push_back((static_cast<i64>(c.kind) * stage_rank.size() + c.stage) * count + c.position);
      }
    }
  }
  Cuts result;
  for (const auto& cut : state.cuts) result.emplace_back(cut.first, cut.end, cut.kind);
  return {result, state.groups, state.rule, state.makespan, actions};
}

using Integers = dynapipe::Table<i64, 2>;

// Interpolated values [column][place] of a grid, and which places it knows; `places` [axis][place].
auto interpolate(const std::vector<dynapipe::Table<double, 1>>& axes, const dynapipe::Table<double, 2>& values,
                 const dynapipe::Table<bool, 1>& known, const dynapipe::Table<double, 2>& places) {
  std::size_t points = 1;
  dynapipe::Grid grid;
  for (const auto& axis : axes) {
    dynapipe::require(axis.size() > 0, "a grid axis has no points");
    points *= axis.size();
    grid.axes.emplace_back(axis.data(), axis.data() + axis.size());
  }
  const std::size_t columns = values.shape(0), count = places.shape(1);
  dynapipe::require(values.shape(1) == points && known.size() == points && places.shape(0) == axes.size() && axes.size() <= dynapipe::Grid::kMost,
                    "a grid's axes, values, known points and places have sizes that do not match");
  std::vector<double> at(columns * count);
  std::vector<char> is_known(count);
  {
    nb::gil_scoped_release unlocked;
    grid.interpolate(values.data(), columns, known.data(), places.data(), count, at.data(), is_known.data());
  }
  return std::pair{dynapipe::make_array<double, 2, double>(std::move(at), {columns, count}),
                   dynapipe::make_array<char, 1, bool>(std::move(is_known), {count})};
}

// One kind's records of all shapes, (shapes, stages, fields), from a table (stages, shapes) of each field. Twin:
// `problem.records_of`.
void fill_records(const std::vector<Integers>& tables, nb::ndarray<i64, nb::ndim<3>, nb::c_contig, nb::device::cpu> records) {
  const std::size_t shapes = records.shape(0), stages = records.shape(1), block = 8;  // a cache line of every table
  if (tables.size() != dynapipe::kFields || records.shape(2) != dynapipe::kFields) throw std::invalid_argument("a record has another number of fields");
  for (const auto& table : tables) {
    if (table.shape(0) > stages || table.shape(1) != shapes) throw std::invalid_argument("tables have sizes that do not match");
  }
  i64* const out = records.data();
  nb::gil_scoped_release unlocked;
  for (std::size_t first = 0; first < shapes; first += block) {
    const std::size_t end = std::min(first + block, shapes);
    for (std::size_t field = 0; field < tables.size(); ++field) {
      for (std::size_t s = 0; s < tables[field].shape(0); ++s) {
        const i64* const row = tables[field].data() + s * shapes;
        for (std::size_t k = first; k < end; ++k) out[(k * stages + s) * dynapipe::kFields + field] = row[k];
      }
    }
  }
}

using Widths = nb::ndarray<const int, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void check_widths(const Integers& costs, const Widths& widths) {
  if (widths.shape(0) != costs.shape(0)) throw std::invalid_argument("widths have another size than the costs");
  for (std::size_t k = 0; k < widths.shape(0); ++k) {
    if (widths(k) < 1 || widths(k) > static_cast<int>(costs.shape(1))) throw std::invalid_argument("a width is outside the costs");
  }
}

// For every bound: the sum of the cheapest cuts, and their ends.
std::vector<std::pair<i64, std::vector<int>>> cheapest_cuts(const Integers& costs, const Widths& widths, const std::vector<i64>& bounds) {
  check_widths(costs, widths);
  std::vector<std::pair<i64, std::vector<int>>> found(bounds.size());
  nb::gil_scoped_release unlocked;
  for (std::size_t k = 0; k < bounds.size(); ++k) {
    found[k].first = dynapipe::cheapest_cuts(costs.data(), static_cast<int>(costs.shape(0)), static_cast<int>(costs.shape(1)),
                                             widths.data(), bounds[k], &found[k].second);
  }
  return found;
}

i64 least_bound(const Integers& costs, const Widths& widths) {
  check_widths(costs, widths);
  nb::gil_scoped_release unlocked;
  return dynapipe::least_bound(costs.data(), static_cast<int>(costs.shape(0)), static_cast<int>(costs.shape(1)), widths.data());
}

Groups regrouped(const Groups& groups, const std::vector<i64>& encoder, const std::vector<i64>& decoder,
                 const std::vector<double>& law, i64 most_tokens, i64 moves, std::uint64_t seed) {
  if (law.size() != 6 || groups.size() < 2) throw std::invalid_argument("a law has 6 numbers, and there are 2 groups or more");
  if (encoder.size() != decoder.size()) throw std::invalid_argument("an item has a length on each side");
  for (const auto& group : groups) {
    if (group.empty()) throw std::invalid_argument("a group is empty");
    for (int item : group) {
      if (item < 0 || item >= static_cast<int>(encoder.size())) throw std::invalid_argument("a group has an item without lengths");
    }
  }
  nb::gil_scoped_release unlocked;
  return dynapipe::Regrouping(groups, encoder, decoder, law, most_tokens).after(moves, seed);
}

Groups balanced(const Groups& groups, const std::vector<i64>& costs, i64 floor, i64 rounds, bool equal_counts) {
  if (groups.empty()) throw std::invalid_argument("there are no groups to balance");
  for (const auto& group : groups) {
    for (int item : group) {
      if (item < 0 || item >= static_cast<int>(costs.size())) throw std::invalid_argument("a group has an item without a cost");
    }
  }
  nb::gil_scoped_release unlocked;
  return dynapipe::Balance(groups, costs, equal_counts).refined(floor, rounds);
}

using Times = nb::ndarray<const i64, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ranges = std::vector<std::pair<int, int>>;

// Cuts (first < 0: merged away) and groups of cuts after so many moves.
std::pair<Ranges, Groups> levelled(const Integers& work, const Integers& head, const Integers& tail, const Times& total,
                                   const Shapes& shapes, const Ranges& cuts, const Groups& groups, i64 moves,
                                   std::uint64_t seed, bool equal_counts) {
  const std::size_t count = total.shape(0), ranks = work.shape(1);
  for (const Integers* one : {&work, &head, &tail}) {
    if (one->shape(0) != count || one->shape(1) != ranks) throw std::invalid_argument("times of shapes have sizes that do not match");
  }
  int item = 0;
  for (auto [first, end] : cuts) {
    if (first != item || end <= first || end > static_cast<int>(shapes.shape(0))) throw std::invalid_argument("cuts must cover the items in turn");
    item = end;
  }
  if (item != static_cast<int>(shapes.shape(0))) throw std::invalid_argument("cuts must cover the items in turn");
  std::vector<int> times_held(cuts.size(), 0);
  for (const auto& group : groups) {
    for (int m : group) {
      if (m < 0 || m >= static_cast<int>(cuts.size()) || times_held[m]++) throw std::invalid_argument("every cut is in one group");
    }
  }
  nb::gil_scoped_release unlocked;
  const dynapipe::RankTimes times{static_cast<int>(ranks), work.data(), head.data(), tail.data(), total.data()};
  dynapipe::Levelling job(times, shapes.data(), static_cast<int>(shapes.shape(0)), static_cast<int>(shapes.shape(1)), cuts, groups, equal_counts);
  job.improve(moves, seed);
  return {job.cuts(), job.groups()};
}

i64 preemptive_ns(const Times& heads, const Times& durations, const Times& tails) {
  const std::size_t count = heads.shape(0);
  if (durations.shape(0) != count || tails.shape(0) != count) throw std::invalid_argument("jobs have sizes that do not match");
  nb::gil_scoped_release unlocked;
  return dynapipe::preemptive_ns(heads.data(), durations.data(), tails.data(), count);
}

}  // namespace

NB_MODULE(_core, module) {
  module.doc() = "Hot loops of planning";
  module.def("search", &search);
  module.def("preemptive_ns", &preemptive_ns);
  module.def("levelled", &levelled);
  module.def("balanced", &balanced);
  module.def("regrouped", &regrouped);
  module.def("interpolate", &interpolate);
  module.def("fill_records", &fill_records);
  module.def("cheapest_cuts", &cheapest_cuts);
  module.def("least_bound", &least_bound);
  dynapipe::programs::bind_programs(module);
}
