// Types that all headers share.
#pragma once

#include <cstdint>
#include <vector>

namespace dynapipe {

using i64 = std::int64_t;
using Groups = std::vector<std::vector<int>>;  // items of each group
constexpr i64 kNever = i64{1} << 60;

}  // namespace dynapipe
