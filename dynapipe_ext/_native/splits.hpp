// Prices of shapes from a measured grid, and the cheapest cuts of a sequence.
#pragma once

#include "numbers.hpp"

namespace dynapipe {

// The axes of a rectangular grid of points.
struct Grid {
  static constexpr int kMost = 8;  // axes
  std::vector<std::vector<double>> axes;

  std::size_t num_points() const {
    std::size_t points = 1;
    for (const auto& axis : axes) points *= axis.size();
    return points;
  }

  // Multilinear values [column][place] at `places` [axis][place], of `values` [column][point]: the smallest coordinate
  // counts below the grid. A place is known within the grid if all corners with weight are. One fixed order of
  // operations gives the same bits everywhere.
  void interpolate(const double* values, std::size_t columns, const bool* known, const double* places, std::size_t count,
                   double* total, char* is_known) const {
    const int dimensions = static_cast<int>(axes.size());
    const std::size_t points = num_points();
    std::fill(total, total + columns * count, 0.0);
    for (std::size_t k = 0; k < count; ++k) {
      std::size_t low[kMost], high[kMost];
      double share[kMost];
      bool ok = true;
      for (int a = 0; a < dimensions; ++a) {
        const auto& axis = axes[a];
        const double x = std::max(places[a * count + k], axis.front());
        ok &= x <= axis.back();
        const i64 after = std::upper_bound(axis.begin(), axis.end(), x) - axis.begin() - 1;
        const i64 last = static_cast<i64>(axis.size()) - 1;
        low[a] = static_cast<std::size_t>(std::min(std::max(after, i64{0}), std::max(last - 1, i64{0})));
        high[a] = std::min(low[a] + 1, static_cast<std::size_t>(last));
        const double width = axis[high[a]] - axis[low[a]];
        share[a] = std::min(std::max((x - axis[low[a]]) / (width > 0 ? width : 1.0), 0.0), 1.0);
      }
      for (int corner = 0; corner < (1 << dimensions); ++corner) {
        std::size_t flat = 0;
        double weight = 1.0;
        for (int a = 0; a < dimensions; ++a) {
          const bool upper = corner >> (dimensions - 1 - a) & 1;
          flat = flat * axes[a].size() + (upper ? high[a] : low[a]);
          weight = weight * (upper ? share[a] : 1.0 - share[a]);
        }
        ok &= known[flat] || weight == 0;
        for (std::size_t c = 0; c < columns; ++c) total[c * count + k] += weight * values[c * points + flat];
      }
      is_known[k] = ok;
    }
  }
};

// The costs of the parts of a sequence: the part of `items` that ends before `end` has that at
// `costs[(end - 1) * stride + items - 1]`, of which the first `widths[end - 1]` count.
struct CutCosts {
  const i64* costs;
  int items, stride;
  const int* widths;

  // Calls `visit(items, cost)` for every part with this end.
  template <typename Visit>
  void visit_parts(int end, Visit visit) const {
    const i64* row = costs + static_cast<std::size_t>(end - 1) * stride;
    for (int r = 1; r <= std::min(widths[end - 1], end); ++r) visit(r, row[r - 1]);
  }
};

constexpr i64 kUnreached = i64{1} << 61;

// Returns the sum of the cheapest cuts into parts that cost at most `bound` each (kUnreached or more if there are none),
// and the end of each part. Equal sums have fewer items last.
inline std::pair<i64, std::vector<int>> find_cheapest_cuts(const CutCosts& costs, i64 bound) {
  std::vector<i64> sums(costs.items + 1, kUnreached);
  std::vector<int> taken(costs.items + 1, 1), ends;
  sums[0] = 0;
  for (int end = 1; end <= costs.items; ++end) {
    i64 best = kUnreached;
    costs.visit_parts(end, [&](int items, i64 cost) {
      const i64 total = cost > bound ? kUnreached : sums[end - items] + cost;
      if (total < best) {
        best = total;
        taken[end] = items;
      }
    });
    sums[end] = best;
  }
  for (int end = costs.items; end > 0; end -= taken[end]) ends.push_back(end);
  std::reverse(ends.begin(), ends.end());
  return {sums[costs.items], ends};
}

// Returns the smallest bound under which there are cuts.
inline i64 find_least_bound(const CutCosts& costs) {
  std::vector<i64> least(costs.items + 1, i64{1} << 50);
  least[0] = 0;
  for (int end = 1; end <= costs.items; ++end) {
    i64 best = i64{1} << 62;
    costs.visit_parts(end, [&](int items, i64 cost) { best = std::min(best, std::max(least[end - items], cost)); });
    least[end] = best;
  }
  return least[costs.items];
}

}  // namespace dynapipe
