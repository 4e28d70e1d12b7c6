// Arguments and results of what Python calls: tables of numbers, fields of objects, and their checks.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <initializer_list>
#include <limits>
#include <stdexcept>
#include <string>

#include "numbers.hpp"

namespace dynapipe {

namespace nb = nanobind;

template <typename T, int kDimensions>
using Table = nb::ndarray<const T, nb::ndim<kDimensions>, nb::c_contig, nb::device::cpu>;

inline void require(bool holds, const char* otherwise) {
  if (!holds) throw std::invalid_argument(otherwise);
}

template <typename... Tables>
void require_shape(std::initializer_list<std::size_t> shape, const Tables&... tables) {
  const auto has_shape = [&](const auto& table) {
    return table.ndim() == shape.size() && std::equal(shape.begin(), shape.end(), table.shape_ptr());
  };
  require((has_shape(tables) && ...), "tables have sizes that do not match");
}

// Checks that every number of every group is one of `count` items.
inline void require_items(const Groups& groups, std::size_t count) {
  for (const auto& group : groups) {
    for (int item : group) require(item >= 0 && static_cast<std::size_t>(item) < count, "a group has an item that does not exist");
  }
}

// Reads the fields of a Python object by their names.
class Fields {
 public:
  explicit Fields(nb::handle object) : object_(object) {}

  template <typename T>
  T get(const char* name) const {
    return nb::cast<T>(object_.attr(name));
  }

  i64 get_number(const char* name, i64 min, i64 max = std::numeric_limits<i64>::max()) const {
    const i64 value = get<i64>(name);
    if (value < min || value > max) {
      throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + " but must be " + std::to_string(min) + " to " + std::to_string(max));
    }
    return value;
  }

 private:
  nb::handle object_;
};

// Makes a numpy array that owns its numbers.
template <typename Number, int kDimensions, typename T>
nb::ndarray<nb::numpy, Number, nb::ndim<kDimensions>> make_array(std::vector<T>&& numbers, std::initializer_list<std::size_t> shape) {
  auto* kept = new std::vector<T>(std::move(numbers));
  nb::capsule owner(kept, [](void* one) noexcept { delete static_cast<std::vector<T>*>(one); });
  return {reinterpret_cast<Number*>(kept->data()), shape, owner};
}

}  // namespace dynapipe
