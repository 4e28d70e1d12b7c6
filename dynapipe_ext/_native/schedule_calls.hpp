// Schedules as Python has them, timed and weighed.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <string>
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

inline void check_shape(const LongTable& table, std::size_t rows, std::size_t columns) {
  if (table.shape(0) != rows || table.shape(1) != columns) throw std::invalid_argument("tables have sizes that do not match");
}

// The ranks' actions as `run_steps` takes them; `tables` of F, B, I, W and transfers are (stage, micro-batch). Slots: one
// that is full, one that never is, one that nobody waits for, then the inputs of forwards and those of gradients.
inline std::vector<std::vector<Step>> timed_steps(const nb::sequence& schedule, const nb::tuple& kinds,
                                                  const std::vector<int>& stage_ranks, const std::vector<LongTable>& tables) {
  const i64 stages = stage_ranks.size(), count = tables[0].shape(1);
  for (int letter = 0; letter < 4; ++letter) check_shape(tables[letter], stages, count);
  check_shape(tables[4], stages ? stages - 1 : 0, count);
  const i64 now = 0, never = 1, nowhere = 2, forwards = 3, gradients = forwards + stages * count;
  const auto delay = [&](i64 boundary, i64 m) {
    return stage_ranks[boundary] == stage_ranks[boundary + 1] ? 0 : tables[4].data()[boundary * count + m];
  };
  std::vector<std::vector<Step>> all;
  for (const auto& actions : actions_of(schedule, kinds, stages, count)) {
    auto& steps = all.emplace_back();
    steps.reserve(actions.size());
    std::vector<char> has_gradient(stages * count, 0);  // its I stands before
    for (const auto& [letter, stage, m] : actions) {
      const i64 place = stage * count + m, duration = tables[letter - kForward].data()[place];
      if (letter == kForward) {
        const bool is_last = stage + 1 == stages;
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

// Spans of every rank's actions, and where each rank that can never go on stands.
inline std::pair<Spans, std::vector<std::pair<int, int>>> simulated(const nb::sequence& schedule, const nb::tuple& kinds,
    const std::vector<int>& stage_ranks, const std::vector<LongTable>& tables) {
  const auto steps = timed_steps(schedule, kinds, stage_ranks, tables);
  nb::gil_scoped_release unlocked;
  return run_steps(steps, 3 + 2 * static_cast<i64>(stage_ranks.size() * tables[0].shape(1)));
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
