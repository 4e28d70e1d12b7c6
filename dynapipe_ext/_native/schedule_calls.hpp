// Schedules as Python has them, timed and weighed. Twins: schedules/evaluation/simulate.py.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <utility>
#include <vector>

#include "judge.hpp"
#include "programs.hpp"

namespace dynapipe::programs {

namespace nb = nanobind;

using LongTable = nb::ndarray<const i64, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Actions [rank] of a schedule; `kinds` are F, B, I and W. An action outside the costs is refused.
inline RankActions actions_of(const nb::sequence& schedule, const nb::tuple& kinds, i64 stages, i64 micro_batches) {
  const nb::str stage_name("stage"), kind_name("kind"), micro_batch_name("micro_batch");
  RankActions ranks;
  for (nb::handle rank : schedule) {
    auto& actions = ranks.emplace_back();
    for (nb::handle one : nb::borrow<nb::sequence>(rank)) {
      const nb::object kind = nb::getattr(one, kind_name);
      int letter = kForward;
      while (letter <= kBackwardWeight && !kind.is(kinds[letter - kForward])) ++letter;
      const i64 stage = nb::cast<i64>(nb::getattr(one, stage_name)), m = nb::cast<i64>(nb::getattr(one, micro_batch_name));
      if (letter > kBackwardWeight || stage < 0 || stage >= stages || m < 0 || m >= micro_batches) {
        throw std::invalid_argument("an action is outside the costs");
      }
      actions.push_back({letter, static_cast<int>(stage), static_cast<int>(m)});
    }
  }
  return ranks;
}

inline void check_shape(const LongTable& table, std::size_t rows, std::size_t columns) {
  if (table.shape(0) != rows || table.shape(1) != columns) throw std::invalid_argument("tables have sizes that do not match");
}

// Times of F, B, I and W, and over each boundary between two ranks.
struct TimeTables {
  int stages, count;
  const i64* of_letter[4];
  const i64* transfer;
};

// A rank's actions as `run_steps` takes them. Slots: one that is full, one that never is, one that nobody waits for,
// then the inputs of forwards and those of gradients.
inline std::vector<Step> steps_of(const std::vector<Action>& actions, const TimeTables& times, const std::vector<int>& stage_ranks) {
  const i64 now = 0, never = 1, nowhere = 2, forwards = 3, gradients = forwards + static_cast<i64>(times.stages) * times.count;
  const auto delay = [&](int boundary, i64 m) {
    return stage_ranks[boundary] == stage_ranks[boundary + 1] ? 0 : times.transfer[boundary * static_cast<i64>(times.count) + m];
  };
  std::vector<Step> steps;
  steps.reserve(actions.size());
  std::vector<char> has_gradient(static_cast<std::size_t>(times.stages) * times.count, 0);  // its I stands before
  for (const auto& [letter, stage, m] : actions) {
    const i64 place = stage * static_cast<i64>(times.count) + m, duration = times.of_letter[letter - kForward][place];
    if (letter == kForward) {
      const bool is_last = stage + 1 == times.stages;
      steps.emplace_back(stage ? forwards + place : now, duration, is_last ? gradients + place : forwards + place + times.count,
                         is_last ? 0 : delay(stage, m));
    } else if (letter == kBackwardWeight) {
      steps.emplace_back(has_gradient[place] ? now : never, duration, nowhere, 0);
    } else {
      if (letter == kBackwardInput) has_gradient[place] = 1;
      steps.emplace_back(gradients + place, duration, stage ? gradients + place - times.count : nowhere, stage ? delay(stage - 1, m) : 0);
    }
  }
  return steps;
}

// Spans of every rank's actions, and where each rank that can never go on stands.
inline std::pair<Spans, std::vector<std::pair<int, int>>> simulated(
    const nb::sequence& schedule, const nb::tuple& kinds, const std::vector<int>& stage_ranks, const LongTable& forward,
    const LongTable& backward, const LongTable& input, const LongTable& weight, const LongTable& transfer) {
  const std::size_t stages = stage_ranks.size(), count = forward.shape(1);
  for (const LongTable* one : {&forward, &backward, &input, &weight}) check_shape(*one, stages, count);
  check_shape(transfer, stages ? stages - 1 : 0, count);
  const RankActions ranks = actions_of(schedule, kinds, stages, count);
  const TimeTables times{static_cast<int>(stages), static_cast<int>(count),
                         {forward.data(), backward.data(), input.data(), weight.data()}, transfer.data()};
  nb::gil_scoped_release unlocked;
  std::vector<std::vector<Step>> steps;
  for (const auto& actions : ranks) steps.push_back(steps_of(actions, times, stage_ranks));
  return run_steps(steps, 3 + 2 * static_cast<i64>(stages * count));
}

// Largest memory of each rank at any time; `counted` says of F, B, I and W whether they have working bytes.
inline std::vector<i64> peak_bytes(const nb::sequence& schedule, const nb::tuple& kinds, const LongTable& stored,
                                   const LongTable& working, const std::vector<i64>& static_bytes, const std::vector<bool>& counted) {
  const std::size_t count = stored.shape(1);
  check_shape(working, stored.shape(0), count);
  const RankActions ranks = actions_of(schedule, kinds, stored.shape(0), count);
  if (static_bytes.size() != ranks.size() || counted.size() != 4) throw std::invalid_argument("tables have sizes that do not match");
  std::vector<i64> peaks;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    i64 held = static_bytes[r], peak = held;
    for (const auto& [letter, stage, m] : ranks[r]) {
      const i64 before = held, place = stage * static_cast<i64>(count) + m;
      if (letter == kForward) held += stored.data()[place];
      else if (letter != kBackwardInput) held -= stored.data()[place];
      peak = std::max(peak, std::max(before, held) + (counted[letter - kForward] ? working.data()[place] : 0));
    }
    peaks.push_back(peak);
  }
  return peaks;
}

}  // namespace dynapipe::programs
