// What all headers share: types, and the library's algorithms and vectors.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace dynapipe {

using i64 = std::int64_t;
using Groups = std::vector<std::vector<int>>;  // items of each group
constexpr i64 kNever = i64{1} << 60;

}  // namespace dynapipe
