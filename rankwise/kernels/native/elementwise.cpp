// Element-wise updates of many runs, each of them one pass through memory.
//
// Compiled without contraction of products and sums: an element has the same bits wherever its run was cut.

#include "tiles.h"

#include <cmath>

namespace {

enum Rule { kMomentum = 0, kLion = 1, kAdamW = 2 };

struct Rates {
  double k, lr, beta1, beta2, root, eps, scale, weight_decay;
};

template <typename T>
double squared_norm(const T* values, int64_t count) {
  double sum = 0.0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) sum += static_cast<double>(values[i]) * static_cast<double>(values[i]);
  return sum;
}

template <typename T>
double corrected_norm(const T* grad, const T* reference, int64_t count, T k) {
  double sum = 0.0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) {
    const T corrected = grad[i] + k * (grad[i] - reference[i]);
    sum += static_cast<double>(corrected) * static_cast<double>(corrected);
  }
  return sum;
}

template <typename T, int kRule>
void update(T* __restrict__ param, const T* __restrict__ grad, T* __restrict__ reference, T* __restrict__ first,
            T* __restrict__ second, int64_t count, T coefficient, bool advance, const Rates& rates) {
  const T k = rates.k, keep = 1.0 - rates.lr * rates.weight_decay, lr = rates.lr, rest1 = 1.0 - rates.beta1;
  const T beta2 = rates.beta2, rest2 = 1.0 - rates.beta2, root = rates.root, eps = rates.eps;
  const T step = rates.lr * rates.scale;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const T corrected = (grad[i] + k * (grad[i] - reference[i])) * coefficient;
    const T moment = first[i] + rest1 * (corrected - first[i]);
    first[i] = moment;
    if (kRule == kLion) {
      const T sign = static_cast<T>(moment > 0) - static_cast<T>(moment < 0);
      param[i] = param[i] * keep - (moment == moment ? sign : moment) * lr;
    }
    if (kRule == kAdamW) {
      const T square = second[i] * beta2 + rest2 * (corrected * corrected);
      second[i] = square;
      param[i] = param[i] * keep - step * (moment / (std::sqrt(square) / root + eps));
    }
  }
  // A copy, never the buffer itself: frameworks use it again for the next gradient.
  if (advance) std::copy(grad, grad + count, reference);
}

template <typename T>
void squared_norms(int64_t runs, const int64_t* lengths, T* const* values, double* sums, int64_t tile_size, int threads) {
  const auto tiles = tiles_of(runs, lengths, tile_size);
  std::vector<double> parts(tiles.size());
#pragma omp parallel for num_threads(threads) schedule(static)
  for (size_t index = 0; index < tiles.size(); ++index) {
    const Tile tile = tiles[index];
    parts[index] = squared_norm(values[tile.run] + tile.start, tile.end - tile.start);
  }
  add_up(tiles, parts, runs, sums);
}

template <typename T>
void mars_squared_norms(int64_t runs, const int64_t* lengths, T* const* grads, T* const* references, double k,
                        double* sums, int64_t tile_size, int threads) {
  const auto tiles = tiles_of(runs, lengths, tile_size);
  std::vector<double> parts(tiles.size());
#pragma omp parallel for num_threads(threads) schedule(static)
  for (size_t index = 0; index < tiles.size(); ++index) {
    const Tile tile = tiles[index];
    parts[index] = corrected_norm<T>(grads[tile.run] + tile.start, references[tile.run] + tile.start,
                                     tile.end - tile.start, k);
  }
  add_up(tiles, parts, runs, sums);
}

template <typename T>
void mars_update(int rule, int64_t runs, const int64_t* lengths, T* const* params, T* const* grads,
                 T* const* references, T* const* firsts, T* const* seconds, const double* coefficients, int advance,
                 const Rates& rates, int64_t tile_size, int threads) {
  const auto tiles = tiles_of(runs, lengths, tile_size);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (size_t index = 0; index < tiles.size(); ++index) {
    const auto [run, start, end] = tiles[index];
    const auto apply = rule == kAdamW ? update<T, kAdamW> : rule == kLion ? update<T, kLion> : update<T, kMomentum>;
    apply(params ? params[run] + start : nullptr, grads[run] + start, references[run] + start, firsts[run] + start,
          seconds ? seconds[run] + start : nullptr, end - start, coefficients ? coefficients[run] : 1.0, advance,
          rates);
  }
}

template <typename T>
void scaled_step(int64_t runs, const int64_t* lengths, T* const* params, T* const* directions, const double* ratios,
                 double lr, double weight_decay, int64_t tile_size, int threads) {
  const auto tiles = tiles_of(runs, lengths, tile_size);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (size_t index = 0; index < tiles.size(); ++index) {
    const Tile tile = tiles[index];
    T* __restrict__ param = params[tile.run] + tile.start;
    const T* __restrict__ direction = directions[tile.run] + tile.start;
    const T keep = 1.0 - lr * weight_decay, rate = lr * (ratios ? ratios[tile.run] : 1.0);
#pragma omp simd
    for (int64_t i = 0; i < tile.end - tile.start; ++i) param[i] = param[i] * keep - direction[i] * rate;
  }
}

}  // namespace

#define FORMS(T, SUFFIX)                                                                                              \
  void squared_norms_##SUFFIX(int64_t runs, const int64_t* lengths, T* const* values, double* sums, int64_t tile_size, int threads) {    \
    squared_norms<T>(runs, lengths, values, sums, tile_size, threads);                                                           \
  }                                                                                                                   \
  void mars_squared_norms_##SUFFIX(int64_t runs, const int64_t* lengths, T* const* grads, T* const* references,       \
                                   double k, double* sums, int64_t tile_size, int threads) {                                             \
    mars_squared_norms<T>(runs, lengths, grads, references, k, sums, tile_size, threads);                                        \
  }                                                                                                                   \
  void mars_update_##SUFFIX(int rule, int64_t runs, const int64_t* lengths, T* const* params, T* const* grads,        \
                            T* const* references, T* const* firsts, T* const* seconds, const double* coefficients,    \
                            int advance, const Rates* rates, int64_t tile_size, int threads) {                                           \
    mars_update<T>(rule, runs, lengths, params, grads, references, firsts, seconds, coefficients, advance, *rates,    \
                   tile_size, threads);                                                                                          \
  }                                                                                                                   \
  void scaled_step_##SUFFIX(int64_t runs, const int64_t* lengths, T* const* params, T* const* directions,             \
                            const double* ratios, double lr, double weight_decay, int64_t tile_size, int threads) {                      \
    scaled_step<T>(runs, lengths, params, directions, ratios, lr, weight_decay, tile_size, threads);                             \
  }

extern "C" {
FORMS(float, float32)
FORMS(double, float64)
}
