// What Python calls of programs.hpp and proof.hpp, with their arguments checked.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "programs.hpp"
#include "proof.hpp"
#include "schedule_calls.hpp"

namespace dynapipe::programs {

namespace nb = nanobind;

using IntTable = nb::ndarray<const int, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using RowTable = nb::ndarray<nb::numpy, const int, nb::ndim<2>>;

inline Rows rows_of(const IntTable& table) {
  if (table.shape(1) != kColumns) throw std::invalid_argument("a program has another number of columns");
  return {reinterpret_cast<const Instruction*>(table.data()), table.shape(0)};
}

inline void check_spans(const RankActions& ranks, const RankSpans& times) {
  if (times.size() != ranks.size()) throw std::invalid_argument("times are of another number of ranks");
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    if (times[r].size() != ranks[r].size()) throw std::invalid_argument("every action has its times");
  }
}

// A table that owns its rows.
inline RowTable owned(std::vector<Instruction>&& rows) {
  auto* kept = new std::vector<Instruction>(std::move(rows));
  nb::capsule owner(kept, [](void* one) noexcept { delete static_cast<std::vector<Instruction>*>(one); });
  return RowTable(reinterpret_cast<const int*>(kept->data()), {kept->size(), static_cast<std::size_t>(kColumns)}, owner);
}

// Rows of each rank; transfer and specs are of (boundary, micro-batch).
inline std::vector<RowTable> lowered(const nb::sequence& schedule, const nb::tuple& kinds, int stages, int micro_batches,
                                     const RankSpans& times, const RankSpans& order_times, const LongTable& transfer,
                                     const IntTable& specs) {
  const RankActions ranks = actions_of(schedule, kinds, stages, micro_batches);
  check_spans(ranks, times);
  check_spans(ranks, order_times);
  const std::size_t boundaries = std::max(stages - 1, 0), count = micro_batches;
  if (transfer.shape(0) != boundaries || transfer.shape(1) != count || specs.shape(0) != boundaries || specs.shape(1) != count) {
    throw std::invalid_argument("transfers and specs are of each boundary and micro-batch");
  }
  RankRows rows;
  {
    nb::gil_scoped_release unlocked;
    rows = Lowering(ranks, stages, micro_batches, times, order_times, transfer.data(), specs.data()).rows();
  }
  std::vector<RowTable> tables;
  for (auto& one : rows) tables.push_back(owned(std::move(one)));
  return tables;
}

inline std::pair<std::string, std::vector<int>> text_of(const IntTable& table, int num_specs) {
  const Rows rows = rows_of(table);
  nb::gil_scoped_release unlocked;
  return program_text(rows.first, rows.count, num_specs);
}

// Peak bytes in flight of each rank of a replica, or none where something is wrong.
inline std::vector<i64> proven_peaks(const std::vector<IntTable>& tables, const std::vector<int>& stage_ranks,
                                        int micro_batches, const std::vector<i64>& spec_bytes, bool forward_only,
                                        const std::vector<int>& before, const std::vector<int>& behind) {
  std::vector<Rows> programs;
  for (const auto& table : tables) programs.push_back(rows_of(table));
  const Replica replica{stage_ranks, micro_batches, forward_only, before, behind, spec_bytes};
  for (const auto* pieces : {&before, &behind}) {
    if (pieces->size() != static_cast<std::size_t>(micro_batches)) throw std::invalid_argument("pieces are of each micro-batch");
    for (int m : *pieces) {
      if (m < -1 || m >= micro_batches) throw std::invalid_argument("a piece is outside the micro-batches");
    }
  }
  nb::gil_scoped_release unlocked;
  return peaks_of_proven(replica, programs).value_or(std::vector<i64>{});
}

inline void bind_programs(nb::module_& module) {
  module.def("simulated", &simulated);
  module.def("timed_steps", &timed_steps);
  module.def("peak_bytes", &peak_bytes);
  module.def("lowered", &lowered);
  module.def("program_text", &text_of);
  module.def("peaks_of_proven", &proven_peaks);
}

}  // namespace dynapipe::programs
