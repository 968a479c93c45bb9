// Element-wise updates of many runs, each of them one pass through memory.
//
// Compiled without contraction of products and sums: an element has the same bits wherever its run was cut.

#include "tiles.h"

#include <cmath>
#include <cstring>

namespace {

// Rounded to the nearest, of two to the even one, as torch does.
struct Bfloat16 {
  uint16_t bits;
  Bfloat16() = default;
  Bfloat16(float value) {
    uint32_t wide;
    std::memcpy(&wide, &value, sizeof wide);
    const uint32_t rounded = (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
    bits = static_cast<uint16_t>(value == value ? rounded : 0x7fc0);
  }
  operator float() const {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }
};

enum Rule { kMomentum = 0, kLion = 1, kAdamW = 2, kStep = 3 };

// What the Python side describes; addresses of what there is not are null. R is the type of references.
template <typename T, typename R>
struct Pass {
  int64_t rule, advance, cautious, runs, tile, threads;
  const int64_t* lengths;
  const double* factors;
  T *const *grads, *const *firsts, *const *params, *const *seconds;
  R* const* references;
  double k, lr, beta1, beta2, eps, weight_decay, root, scale;
};

// The gradient of an element, or where there is a reference h: g + k (g - h).
template <typename T, typename R, bool kCompared>
inline T gradient(const T* __restrict__ grad, const R* __restrict__ reference, T k, int64_t i) {
  return kCompared ? grad[i] + k * (grad[i] - static_cast<T>(reference[i])) : grad[i];
}

template <typename T, typename R, bool kCompared>
double squared_norm(const T* grad, const R* reference, int64_t count, T k) {
  double sum = 0.0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) {
    const double value = gradient<T, R, kCompared>(grad, reference, k, i);
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
template <typename T, typename R, int kRule, bool kCompared, bool kCautious>
void update_tile(const T* __restrict__ grad, T* __restrict__ first, T* __restrict__ param, T* __restrict__ second,
                 R* __restrict__ reference, int64_t count, double own, const Pass<T, R>& pass) {
  const T factor = own, k = pass.k, keep = 1.0 - pass.lr * pass.weight_decay, lr = pass.lr, rest1 = 1.0 - pass.beta1;
  const T beta2 = pass.beta2, rest2 = 1.0 - pass.beta2, root = pass.root, eps = pass.eps;
  const T scaled = pass.lr * own, step = pass.lr * pass.scale;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const T found = gradient<T, R, kCompared>(grad, reference, k, i);
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

template <typename T, typename R, int kRule, bool kCompared, bool kCautious>
void update(const Pass<T, R>& pass, const Tile& tile) {
  const auto at = [&](auto* field) { return field ? field[tile.run] + tile.start : nullptr; };
  update_tile<T, R, kRule, kCompared, kCautious>(at(pass.grads), at(pass.firsts), at(pass.params), at(pass.seconds),
                                                 at(pass.references), tile.end - tile.start,
                                                 pass.factors ? pass.factors[tile.run] : 1.0, pass);
}

template <typename T, typename R, bool kCompared, bool kCautious>
auto update_of(int64_t rule) {
  return rule == kAdamW  ? update<T, R, kAdamW, kCompared, kCautious>
         : rule == kLion ? update<T, R, kLion, kCompared, kCautious>
         : rule == kStep ? update<T, R, kStep, kCompared, kCautious>
                         : update<T, R, kMomentum, kCompared, false>;
}

template <typename T, typename R, bool kCompared>
auto update_of(const Pass<T, R>& pass) {
  return pass.cautious ? update_of<T, R, kCompared, true>(pass.rule) : update_of<T, R, kCompared, false>(pass.rule);
}

template <typename T, typename R>
void run(const Pass<T, R>& pass) {
  const auto tiles = tiles_of(pass.runs, pass.lengths, pass.tile);
  const auto apply = pass.references ? update_of<T, R, true>(pass) : update_of<T, R, false>(pass);
#pragma omp parallel for num_threads(pass.threads) schedule(static)
  for (size_t index = 0; index < tiles.size(); ++index) apply(pass, tiles[index]);
}

template <typename T, typename R>
void squared_norms(const Pass<T, R>& pass, double* sums) {
  const auto tiles = tiles_of(pass.runs, pass.lengths, pass.tile);
  std::vector<double> parts(tiles.size());
#pragma omp parallel for num_threads(pass.threads) schedule(static)
  for (size_t index = 0; index < tiles.size(); ++index) {
    const auto [run, start, end] = tiles[index];
    const T* grad = pass.grads[run] + start;
    parts[index] = pass.references
                       ? squared_norm<T, R, true>(grad, pass.references[run] + start, end - start, pass.k)
                       : squared_norm<T, R, false>(grad, nullptr, end - start, 0);
  }
  add_up(tiles, parts, pass.runs, sums);
}

}  // namespace

extern "C" {
void run_float32(const Pass<float, float>* pass) { run(*pass); }
void run_float32_bfloat16(const Pass<float, Bfloat16>* pass) { run(*pass); }
void run_float64(const Pass<double, double>* pass) { run(*pass); }
void squared_norms_float32(const Pass<float, float>* pass, double* sums) { squared_norms(*pass, sums); }
void squared_norms_float32_bfloat16(const Pass<float, Bfloat16>* pass, double* sums) { squared_norms(*pass, sums); }
void squared_norms_float64(const Pass<double, double>* pass, double* sums) { squared_norms(*pass, sums); }
}
