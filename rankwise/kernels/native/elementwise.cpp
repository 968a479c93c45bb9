// Element-wise updates of many runs, each of them one pass through memory.
//
// Compiled without contraction of products and sums: an element has the same bits wherever its run was cut.

#include "tiles.h"

#include <cmath>

namespace {

enum Rule { kMomentum = 0, kLion = 1, kAdamW = 2, kStep = 3 };

// What the Python side describes; addresses of what there is not are null.
template <typename T>
struct Pass {
  int64_t rule, advance, cautious, runs, tile, threads;
  const int64_t* lengths;
  const double* factors;
  T *const *grads, *const *firsts, *const *params, *const *seconds, *const *references;
  double k, lr, beta1, beta2, eps, weight_decay, root, scale;
};

// The gradient of an element, or where there is a reference h: g + k (g - h).
template <typename T, bool kCompared>
inline T gradient(const T* __restrict__ grad, const T* __restrict__ reference, T k, int64_t i) {
  return kCompared ? grad[i] + k * (grad[i] - reference[i]) : grad[i];
}

template <typename T, bool kCompared>
double squared_norm(const T* grad, const T* reference, int64_t count, T k) {
  double sum = 0.0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) {
    const double value = gradient<T, kCompared>(grad, reference, k, i);
    sum += value * value;
  }
  return sum;
}

// What decay leaves of a weight; cautious decay spares those that step away from zero.
template <typename T, bool kCautious>
inline T kept(T weight, T direction, T keep) {
  const bool opposed = kCautious && ((direction < 0 && weight > 0) || (direction > 0 && weight < 0));
  return opposed ? weight : weight * keep;
}

// One tile; compilers take a promise that arrays are apart from parameters only.
template <typename T, int kRule, bool kCompared, bool kCautious>
void update_tile(const T* __restrict__ grad, T* __restrict__ first, T* __restrict__ param, T* __restrict__ second,
                 T* __restrict__ reference, int64_t count, double own, const Pass<T>& pass) {
  const T factor = own, k = pass.k, keep = 1.0 - pass.lr * pass.weight_decay, lr = pass.lr, rest1 = 1.0 - pass.beta1;
  const T beta2 = pass.beta2, rest2 = 1.0 - pass.beta2, root = pass.root, eps = pass.eps;
  const T scaled = pass.lr * own, step = pass.lr * pass.scale;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const T found = gradient<T, kCompared>(grad, reference, k, i);
    if (kRule == kStep) {
      param[i] = kept<T, kCautious>(param[i], found * factor, keep) - found * scaled;
    } else {
      const T value = found * factor, moment = first[i] + rest1 * (value - first[i]);
      first[i] = moment;
      if (kRule == kLion) {
        const T sign = static_cast<T>(moment > 0) - static_cast<T>(moment < 0);
        param[i] = kept<T, kCautious>(param[i], moment, keep) - (moment == moment ? sign : moment) * lr;
      }
      if (kRule == kAdamW) {
        const T square = second[i] * beta2 + rest2 * (value * value);
        second[i] = square;
        param[i] = kept<T, kCautious>(param[i], moment, keep) - step * (moment / (std::sqrt(square) / root + eps));
      }
    }
  }
  // A copy, never the buffer itself: frameworks use it again for the next gradient.
  if (kCompared && pass.advance) std::copy(grad, grad + count, reference);
}

template <typename T, int kRule, bool kCompared, bool kCautious>
void update(const Pass<T>& pass, const Tile& tile) {
  const auto at = [&](T* const* field) { return field ? field[tile.run] + tile.start : nullptr; };
  update_tile<T, kRule, kCompared, kCautious>(at(pass.grads), at(pass.firsts), at(pass.params), at(pass.seconds),
                                              at(pass.references), tile.end - tile.start,
                                              pass.factors ? pass.factors[tile.run] : 1.0, pass);
}

template <typename T, bool kCompared, bool kCautious>
auto update_of(int64_t rule) {
  return rule == kAdamW  ? update<T, kAdamW, kCompared, kCautious>
         : rule == kLion ? update<T, kLion, kCompared, kCautious>
         : rule == kStep ? update<T, kStep, kCompared, kCautious>
                         : update<T, kMomentum, kCompared, false>;
}

template <typename T, bool kCompared>
auto update_of(const Pass<T>& pass) {
  return pass.cautious ? update_of<T, kCompared, true>(pass.rule) : update_of<T, kCompared, false>(pass.rule);
}

template <typename T>
void run(const Pass<T>& pass) {
  const auto tiles = tiles_of(pass.runs, pass.lengths, pass.tile);
  const auto apply = pass.references ? update_of<T, true>(pass) : update_of<T, false>(pass);
#pragma omp parallel for num_threads(pass.threads) schedule(static)
  for (size_t index = 0; index < tiles.size(); ++index) apply(pass, tiles[index]);
}

template <typename T>
void squared_norms(const Pass<T>& pass, double* sums) {
  const auto tiles = tiles_of(pass.runs, pass.lengths, pass.tile);
  std::vector<double> parts(tiles.size());
#pragma omp parallel for num_threads(pass.threads) schedule(static)
  for (size_t index = 0; index < tiles.size(); ++index) {
    const auto [run, start, end] = tiles[index];
    const T* grad = pass.grads[run] + start;
    parts[index] = pass.references
                       ? squared_norm<T, true>(grad, pass.references[run] + start, end - start, pass.k)
                       : squared_norm<T, false>(grad, nullptr, end - start, 0);
  }
  add_up(tiles, parts, pass.runs, sums);
}

}  // namespace

extern "C" {
void run_float32(const Pass<float>* pass) { run(*pass); }
void run_float64(const Pass<double>* pass) { run(*pass); }
void squared_norms_float32(const Pass<float>* pass, double* sums) { squared_norms(*pass, sums); }
void squared_norms_float64(const Pass<double>* pass, double* sums) { squared_norms(*pass, sums); }
}
