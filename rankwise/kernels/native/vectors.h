// Vectors of 16 floats in the compiler's own notation, so that any instruction set will do.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

constexpr int64_t kLanes = 16;

typedef float Vector __attribute__((vector_size(64)));
typedef float Unaligned __attribute__((vector_size(64), aligned(4), may_alias));

inline Vector load(const float* from) { return *reinterpret_cast<const Unaligned*>(from); }
inline void store(float* to, Vector value) { *reinterpret_cast<Unaligned*>(to) = value; }

// Written out: `Vector{} + x` would cost an addition and a shuffle.
inline Vector broadcast(float x) { return Vector{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

// The first `count` lanes, zeros in the others. `count` may be above 16, or below zero: none.
inline Vector load_some(const float* from, int64_t count) {
  if (count >= kLanes) return load(from);
  float lanes[kLanes] = {};
  if (count > 0) std::memcpy(lanes, from, count * sizeof(float));
  return load(lanes);
}

inline void store_some(float* to, Vector value, int64_t count) {
  if (count >= kLanes) return store(to, value);
  float lanes[kLanes];
  store(lanes, value);
  if (count > 0) std::memcpy(to, lanes, count * sizeof(float));
}

inline Vector square_root(Vector value) {
  float lanes[kLanes];
  store(lanes, value);
#pragma omp simd
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = std::sqrt(lanes[lane]);
  return load(lanes);
}
