// Arguments and results of what Python calls: tables of numbers, and their checks.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <utility>
#include <vector>

namespace dynapipe {

namespace nb = nanobind;
using i64 = std::int64_t;

template <typename T, int kDimensions>
using Table = nb::ndarray<const T, nb::ndim<kDimensions>, nb::c_contig, nb::device::cpu>;

inline void require(bool holds, const char* otherwise) {
  if (!holds) throw std::invalid_argument(otherwise);
}

// A numpy array that owns its numbers.
template <typename T, int kDimensions, typename Number>
nb::ndarray<nb::numpy, Number, nb::ndim<kDimensions>> make_array(std::vector<T>&& numbers, std::initializer_list<std::size_t> shape) {
  auto* kept = new std::vector<T>(std::move(numbers));
  nb::capsule owner(kept, [](void* one) noexcept { delete static_cast<std::vector<T>*>(one); });
  return {reinterpret_cast<Number*>(kept->data()), shape, owner};
}

}  // namespace dynapipe
