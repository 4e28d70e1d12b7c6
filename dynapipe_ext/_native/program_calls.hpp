// What Python calls of schedules and programs: arguments are checked, and headers called.
#pragma once

#include "arguments.hpp"
#include "judge.hpp"
#include "programs.hpp"
#include "proof.hpp"

namespace dynapipe::programs {

using InstructionTable = nb::ndarray<nb::numpy, const int, nb::ndim<2>>;

// Reads the actions [rank] of a schedule; `kinds` are F, B, I and W. An action outside the costs is rejected.
inline RankActions read_actions(const nb::sequence& schedule, const nb::tuple& kinds, i64 stages, i64 micro_batches) {
  const nb::str stage_name("stage"), kind_name("kind"), micro_batch_name("micro_batch");
  RankActions ranks;
  for (nb::handle rank : schedule) {
    auto& actions = ranks.emplace_back();
    for (nb::handle one : nb::borrow<nb::sequence>(rank)) {
      const nb::object kind = nb::getattr(one, kind_name);
      int letter = kForward;
      while (letter < kBackwardWeight && !kind.is(kinds[letter - kForward])) ++letter;
      const i64 stage = nb::cast<i64>(nb::getattr(one, stage_name)), m = nb::cast<i64>(nb::getattr(one, micro_batch_name));
      if (stage < 0 || stage >= stages || m < 0 || m >= micro_batches) {
        throw std::invalid_argument("action " + std::string(nb::str(one).c_str()) + " is outside the costs, which have " +
                                    std::to_string(stages) + " stages and " + std::to_string(micro_batches) +
                                    " micro-batches: price every micro-batch of the schedule");
      }
      actions.push_back({letter, static_cast<int>(stage), static_cast<int>(m)});
    }
  }
  return ranks;
}

// Makes the steps of the ranks' actions; `tables` of F, B, I, W and transfers are (stage, micro-batch). Slots: one that
// is full, one that never is, one that nobody waits for, then the inputs of forwards and those of gradients.
inline std::vector<std::vector<Step>> timed_steps(const nb::sequence& schedule, const nb::tuple& kinds,
                                                  const std::vector<int>& stage_ranks, const std::vector<Table<i64, 2>>& tables) {
  require(tables.size() == 5, "times are of F, B, I, W and transfers");
  const std::size_t stages = stage_ranks.size(), count = tables[0].shape(1);
  require_shape({stages, count}, tables[0], tables[1], tables[2], tables[3]);
  require_shape({stages ? stages - 1 : 0, count}, tables[4]);
  const i64 now = 0, never = 1, nowhere = 2, forwards = 3, gradients = forwards + stages * count;
  const auto delay = [&](i64 boundary, i64 m) {
    return stage_ranks[boundary] == stage_ranks[boundary + 1] ? 0 : tables[4](boundary, m);
  };
  std::vector<std::vector<Step>> all;
  for (const auto& actions : read_actions(schedule, kinds, stages, count)) {
    auto& steps = all.emplace_back();
    steps.reserve(actions.size());
    std::vector<char> has_gradient(stages * count, 0);  // its I is before
    for (const auto& [letter, stage, m] : actions) {
      const i64 place = stage * count + m, duration = tables[letter - kForward](stage, m);
      if (letter == kForward) {
        const bool is_last = stage + 1 == static_cast<int>(stages);
        steps.emplace_back(stage ? forwards + place : now, duration, is_last ? gradients + place : forwards + place + count,
                           is_last ? 0 : delay(stage, m));
      } else if (letter == kBackwardWeight) {
        steps.emplace_back(has_gradient[place] ? now : never, duration, nowhere, 0);
      } else {
        if (letter == kBackwardInput) has_gradient[place] = 1;
        steps.emplace_back(gradients + place, duration, stage ? gradients + place - count : nowhere, stage ? delay(stage - 1, m) : 0);
      }
    }
  }
  return all;
}

// Returns the spans of every rank's actions, and the position of each rank that can never continue.
inline auto simulated(const nb::sequence& schedule, const nb::tuple& kinds, const std::vector<int>& stage_ranks,
                      const std::vector<Table<i64, 2>>& tables) {
  const auto steps = timed_steps(schedule, kinds, stage_ranks, tables);
  nb::gil_scoped_release unlocked;
  return run_steps(steps, 3 + 2 * static_cast<i64>(stage_ranks.size() * tables[0].shape(1)));
}

// Returns the largest memory of each rank at any time; `counted` says of F, B, I and W if they have working bytes.
inline std::vector<i64> peak_bytes(const nb::sequence& schedule, const nb::tuple& kinds, const Table<i64, 2>& stored,
                                   const Table<i64, 2>& working, const std::vector<i64>& static_bytes, const std::vector<bool>& counted) {
  require_shape({stored.shape(0), stored.shape(1)}, working);
  const RankActions ranks = read_actions(schedule, kinds, stored.shape(0), stored.shape(1));
  require(static_bytes.size() == ranks.size() && counted.size() == 4, "tables have sizes that do not match");
  std::vector<i64> peaks;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    i64 held = static_bytes[r], peak = held;
    for (const auto& [letter, stage, m] : ranks[r]) {
      const i64 before = held;
      if (letter == kForward) held += stored(stage, m);
      else if (letter != kBackwardInput) held -= stored(stage, m);
      peak = std::max(peak, std::max(before, held) + (counted[letter - kForward] ? working(stage, m) : 0));
    }
    peaks.push_back(peak);
  }
  return peaks;
}

inline Rows read_rows(const Table<int, 2>& table) {
  require_shape({table.shape(0), kColumns}, table);
  return {reinterpret_cast<const Instruction*>(table.data()), table.shape(0)};
}

// Returns the instructions of each rank; transfers and specs are of (boundary, micro-batch).
inline std::vector<InstructionTable> lowered(const nb::sequence& schedule, const nb::tuple& kinds, int stages, int micro_batches,
                                             const RankSpans& times, const RankSpans& order_times, const Table<i64, 2>& transfer,
                                             const Table<int, 2>& specs) {
  const RankActions ranks = read_actions(schedule, kinds, stages, micro_batches);
  for (const RankSpans* spans : {&times, &order_times}) {
    require(spans->size() == ranks.size(), "times are of another number of ranks");
    for (std::size_t r = 0; r < ranks.size(); ++r) require((*spans)[r].size() == ranks[r].size(), "every action has its times");
  }
  require_shape({static_cast<std::size_t>(std::max(stages - 1, 0)), static_cast<std::size_t>(micro_batches)}, transfer, specs);
  RankRows rows;
  {
    nb::gil_scoped_release unlocked;
    rows = Lowering(ranks, stages, micro_batches, times, order_times, transfer.data(), specs.data()).rows();
  }
  std::vector<InstructionTable> tables;
  for (auto& one : rows) {
    const std::size_t count = one.size();
    tables.push_back(make_array<const int, 2>(std::move(one), {count, kColumns}));
  }
  return tables;
}

inline auto text_of(const Table<int, 2>& table, int num_specs) {
  const Rows rows = read_rows(table);
  nb::gil_scoped_release unlocked;
  return program_text(rows.first, rows.count, num_specs);
}

// Returns the peak bytes in flight of each rank of a replica, or none if something is wrong.
inline std::vector<i64> proven_peaks(const std::vector<Table<int, 2>>& tables, const std::vector<int>& stage_ranks, int micro_batches,
                                     const std::vector<i64>& spec_bytes, bool forward_only, const std::vector<int>& before,
                                     const std::vector<int>& behind) {
  std::vector<Rows> programs;
  for (const auto& table : tables) programs.push_back(read_rows(table));
  for (const auto* pieces : {&before, &behind}) {
    require(pieces->size() == static_cast<std::size_t>(micro_batches), "pieces are of each micro-batch");
    for (int m : *pieces) require(m >= -1 && m < micro_batches, "a piece is outside the micro-batches");
  }
  nb::gil_scoped_release unlocked;
  return peaks_of_proven({stage_ranks, micro_batches, forward_only, before, behind, spec_bytes}, programs).value_or(std::vector<i64>{});
}

inline void bind_programs(nb::module_& module) {
  module.def("timed_steps", &timed_steps);
  module.def("simulated", &simulated);
  module.def("peak_bytes", &peak_bytes);
  module.def("lowered", &lowered);
  module.def("program_text", &text_of);
  module.def("peaks_of_proven", &proven_peaks);
}

}  // namespace dynapipe::programs
