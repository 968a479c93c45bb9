// Element-wise updates of many runs go through memory once.
//
// The file is compiled without contraction of products and sums, so that no bit depends on where a run was cut.

#include "narrow.h"

namespace {

// Narrow states of so many elements are opened at a time, and stay in the first-level cache.
constexpr int64_t kOpened = 1024;
// A tile has at most so many elements.
constexpr int64_t kMeasured = 8192;

enum Rule { kMomentum = 0, kLion = 1, kAdamW = 2, kStep = 3, kNesterov = 4 };

// A field of a pass consists of tensors, of codes, or of neither where the rule has no such field.
template <typename T>
struct Field {
  T* const* runs;
  const NarrowRuns* narrow;
  explicit operator bool() const { return runs || narrow; }
};

// A pass as Python describes it; addresses of what the rule lacks are null.
template <typename T>
struct Pass {
  int64_t rule, advance, cautious, runs, tile, threads;
  const int64_t* lengths;
  const double* factors;
  Field<T> grad, exp_avg, param, exp_avg_sq, reference;
  double k, lr, beta1, beta2, eps, weight_decay, root, scale, nesterov;
};

// Returns the address of a tile of a field, which is decoded to `space` if the field is narrow.
template <typename T>
inline T* opened(const Field<T>& field, const Tile& tile, T* space) {
  if constexpr (std::is_same_v<T, float>) {
    if (field.narrow) {
      open_codes(*field.narrow, tile.run, tile.start, tile.end - tile.start, space);
      return space;
    }
  }
  return field.runs ? field.runs[tile.run] + tile.start : nullptr;
}

// Encodes the new values of a tile if the field is narrow.
template <typename T>
inline void keep(const Field<T>& field, const Tile& tile, const T* values) {
  if constexpr (std::is_same_v<T, float>)
    if (field.narrow) keep_codes(*field.narrow, tile.run, tile.start, tile.end - tile.start, values);
}

// Returns the gradient g of an element, or g + k (g - h) where there is a reference h.
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

// Returns what decay leaves of a weight; cautious decay spares weights that step away from zero.
template <typename T, bool kCautious>
inline T kept(T weight, T direction, T keep) {
  const bool opposed = kCautious && ((direction < 0 && weight > 0) || (direction > 0 && weight < 0));
  return opposed ? weight : weight * keep;
}

// Updates one tile. It is a function of its own because compilers heed __restrict__ only on parameters.
template <typename T, int kRule, bool kCompared, bool kCautious>
void update_tile(const T* __restrict__ grad, T* __restrict__ first, T* __restrict__ param, T* __restrict__ second,
                 const T* __restrict__ reference, int64_t count, double own, const Pass<T>& pass) {
  const T factor = own, k = pass.k, keep = 1.0 - pass.lr * pass.weight_decay, lr = pass.lr, rest1 = 1.0 - pass.beta1;
  const T beta2 = pass.beta2, rest2 = 1.0 - pass.beta2, root = pass.root, eps = pass.eps;
  const T scaled = pass.lr * own, step = pass.lr * pass.scale, share = pass.nesterov;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const T found = gradient<T, kCompared>(grad, reference, k, i);
    if (kRule == kStep) {
      param[i] = kept<T, kCautious>(param[i], found * factor, keep) - found * scaled;
    } else {
      const T value = found * factor, moment = first[i] + rest1 * (value - first[i]);
      first[i] = moment;
      // A share of 0 leaves the momentum as it is; 0 times an infinite difference would be NaN.
      const T ahead = share == 0 ? moment : moment + share * (value - moment);
      if (kRule == kNesterov) param[i] = ahead;
      if (kRule == kLion) {
        const T sign = static_cast<T>(ahead > 0) - static_cast<T>(ahead < 0);
        param[i] = kept<T, kCautious>(param[i], ahead, keep) - (ahead == ahead ? sign : ahead) * lr;
      }
      if (kRule == kAdamW) {
        const T square = second[i] * beta2 + rest2 * (value * value);
        second[i] = square;
        param[i] = kept<T, kCautious>(param[i], moment, keep) - step * (moment / (std::sqrt(square) / root + eps));
      }
    }
  }
}

template <typename T, int kRule, bool kCompared, bool kCautious>
void update(const Pass<T>& pass, const Tile& tile) {
  alignas(64) T first_space[kOpened], second_space[kOpened], reference_space[kOpened];
  const T* grad = pass.grad.runs[tile.run] + tile.start;
  T* first = opened(pass.exp_avg, tile, first_space);
  T* second = opened(pass.exp_avg_sq, tile, second_space);
  T* reference = opened(pass.reference, tile, reference_space);
  T* param = opened<T>(pass.param, tile, nullptr);
  const int64_t count = tile.end - tile.start;
  const double factor = pass.factors ? pass.factors[tile.run] : 1.0;
  if constexpr (kRule == kNesterov) {
    // The result may go to the memory of the gradients, and so is first written elsewhere.
    alignas(64) T space[kMeasured];
    update_tile<T, kRule, kCompared, kCautious>(grad, first, space, second, reference, count, factor, pass);
    std::copy(space, space + count, param);
  } else {
    update_tile<T, kRule, kCompared, kCautious>(grad, first, param, second, reference, count, factor, pass);
  }
  keep(pass.exp_avg, tile, first);
  keep(pass.exp_avg_sq, tile, second);
  if (!kCompared || !pass.advance) return;
  // The reference is a copy, because frameworks use the buffer again for the next gradient.
  if (pass.reference.narrow) {
    keep(pass.reference, tile, grad);
  } else {
    std::copy(grad, grad + count, reference);
  }
}

template <typename T, bool kCompared, bool kCautious>
auto update_of(int64_t rule) {
  return rule == kAdamW      ? update<T, kAdamW, kCompared, kCautious>
         : rule == kLion     ? update<T, kLion, kCompared, kCautious>
         : rule == kStep     ? update<T, kStep, kCompared, kCautious>
         : rule == kNesterov ? update<T, kNesterov, kCompared, false>
                             : update<T, kMomentum, kCompared, false>;
}

template <typename T, bool kCompared>
auto update_of(const Pass<T>& pass) {
  return pass.cautious ? update_of<T, kCompared, true>(pass.rule) : update_of<T, kCompared, false>(pass.rule);
}

template <typename T>
void run(const Pass<T>& pass) {
  const auto tiles = tiles_of(pass.runs, pass.lengths, pass.tile);
  const auto apply = pass.reference ? update_of<T, true>(pass) : update_of<T, false>(pass);
#pragma omp parallel for num_threads(pass.threads) schedule(static)
  for (size_t index = 0; index < tiles.size(); ++index) apply(pass, tiles[index]);
}

template <typename T>
void squared_norms(const Pass<T>& pass, double* sums) {
  const auto tiles = tiles_of(pass.runs, pass.lengths, pass.tile);
  std::vector<double> parts(tiles.size());
#pragma omp parallel for num_threads(pass.threads) schedule(static)
  for (size_t index = 0; index < tiles.size(); ++index) {
    alignas(64) T space[kMeasured];
    const Tile& tile = tiles[index];
    const T *grad = pass.grad.runs[tile.run] + tile.start, *reference = opened(pass.reference, tile, space);
    parts[index] = reference ? squared_norm<T, true>(grad, reference, tile.end - tile.start, pass.k)
                             : squared_norm<T, false>(grad, nullptr, tile.end - tile.start, 0);
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
