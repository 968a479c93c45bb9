// SONew's pass updates statistics in place and computes directions and their norms, for any band and any cut of runs.
//
// The file is compiled for one band, without contraction of products and sums, and has the order of operations of
// rankwise/sonew/banded.py: bits do not depend on where a run was cut, and are those of the plain functions. Narrow
// statistics are opened and stored again tile by tile, so that only their codes go through memory.

#include "narrow.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

namespace {

constexpr int64_t kBand = BAND;
constexpr double kOfficialGraftEps = 1e-8;

enum Graft { kNone = 0, kAdam = 1, kAdamOfficial = 2, kMomentumGraft = 3, kSgd = 4 };

struct Rates {
  double beta1, beta2, correction1, correction2, eps, gamma, graft_eps;
};

// All runs of a call. Fields are gradient, momentum, diagonal and the edges by distance.
template <typename T>
struct Runs {
  const int64_t* lengths;
  const int64_t* starts;
  const int64_t* chains;      // 0: the parameter is one chain
  T* const* fields;           // [field * runs + run]
  const T* const* margins;    // [2 * run + side], (fields, BAND) each; null: zeros
  T* const* outs;
  const NarrowRuns* const* narrow;  // by field; null where it is wide
  T* const* loose;  // [2 * (field * runs + run) + side]: new values of what lies in blocks that other runs share
  const int64_t* ends;  // [2 * run + side]: what is between them lies in blocks that the run has alone
  int64_t runs;

  T* field(int64_t index, int64_t run) const { return fields[index * runs + run]; }

  // Returns an element of a run or of its margins.
  T at(int64_t index, int64_t run, int64_t position) const {
    if (position >= 0 && position < lengths[run]) {
      if constexpr (std::is_same_v<T, float>) {
        float value;
        if (narrow[index]) return open_codes(*narrow[index], run, position, 1, &value), value;
      }
      return field(index, run)[position];
    }
    const bool right = position >= 0;
    const T* margin = margins[2 * run + right];
    const int64_t place = right ? position - lengths[run] : position + kBand;
    return margin ? margin[index * kBand + place] : T(0);
  }
};

constexpr int64_t kFields = 3 + kBand;
constexpr int64_t kLanes = 16;  // what lengths are rounded up to
constexpr int64_t kLine = 64;   // bytes of a line of the cache

constexpr int64_t rounded(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

// So many elements are worked on at a time; all arrays, and the memory they come from, stay in the first-level cache.
constexpr int64_t kPiece = 128;
// Statistics are so far ahead of directions, which need those of later elements and factors of earlier ones.
constexpr int64_t kLead = rounded(kBand);
// An array has room for elements after the last one, which are read and mean nothing.
constexpr int64_t kStride = kPiece + 3 * kLead + kLanes;

// The arrays. Edges and coefficients count from distance 1; arrays up to kCarried go on in the next piece. A selected
// value goes to another array than it came from, or compilers make it a conditional store, which is slow.
enum Array : int64_t {
  kMomentum,
  kDamped,
  kWhitened,
  kEdge = kWhitened,
  kCoefficient = kEdge + kBand,
  kCarried = kCoefficient + kBand,
  kOtherCoefficient = kCarried,
  kFirst = kOtherCoefficient + kBand + 1,
  kOtherFirst,
  kLast,
  kBefore,
  kBorder = kBefore + kBand,
  kArrays = kBorder + kFields
};

template <typename T>
class Pass {
 public:
  Pass(const Runs<T>& runs, const Rates& rates, int graft, int64_t tile_size)
      : runs_(runs), rates_(rates), graft_(graft), memory_(kArrays * kStride + kLine) {
    for (int64_t field = 0; field < kFields; ++field)
      if (runs_.narrow[field]) opened_[field].resize(tile_size);
  }

  // `halo` has the old statistics of BAND elements on the left and on the right.
  void run(const Tile& tile, const T* halo, double* square, double* graft_square) {
    tile_ = tile;
    halo_ = halo;
    *square = *graft_square = 0.0;
    open();
    if constexpr (kBand > 0) {
      advance(tile.start - kLead, 2 * kLead, 0);
      factor(0, kLead);
    }
    for (int64_t start = tile.start; start < tile.end; start += kPiece) {
      const int64_t count = std::min(kPiece, tile.end - start), whole = rounded(count);
      advance(start + kLead, whole, 2 * kLead);
      if constexpr (kBand > 0) factor(kLead, whole);
      *square += direct(start, count);
      *graft_square += graft_norm(start, count);
      if (count == kPiece)
        for (int64_t index = 0; index <= kCarried; ++index)
          std::memcpy(array(index), array(index) + kPiece, 2 * kLead * sizeof(T));
    }
    store();
  }

 private:
  // Vectors that lie in two lines of the cache take twice as long.
  T* array(int64_t index) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(memory_.data());
    return reinterpret_cast<T*>((address + kLine - 1) / kLine * kLine) + index * kStride;
  }

  // Returns where an element of the tile is: in its run, or in what was opened.
  T* memory(int64_t field, int64_t position) {
    return runs_.narrow[field] ? opened_[field].data() + (position - tile_.start)
                               : runs_.field(field, tile_.run) + position;
  }

  void open() {
    if constexpr (std::is_same_v<T, float>)
      for (int64_t field = 1; field < kFields; ++field)
        if (runs_.narrow[field])
          open_codes(*runs_.narrow[field], tile_.run, tile_.start, tile_.end - tile_.start, opened_[field].data());
  }

  void store() {
    if constexpr (std::is_same_v<T, float>) {
      const int64_t* ends = runs_.ends + 2 * tile_.run;
      for (int64_t field = 1; field < kFields; ++field) {
        if (!runs_.narrow[field]) continue;
        const bool blocks = runs_.narrow[field]->kind != kBfloat16;
        const int64_t first = blocks ? std::clamp(ends[0], tile_.start, tile_.end) : tile_.start;
        const int64_t last = blocks ? std::clamp(ends[1], first, tile_.end) : tile_.end;
        T* const* loose = runs_.loose + 2 * (field * runs_.runs + tile_.run);
        if (first > tile_.start) std::copy_n(memory(field, tile_.start), first - tile_.start, loose[0] + tile_.start);
        if (last < tile_.end) std::copy_n(memory(field, last), tile_.end - last, loose[1] + (last - ends[1]));
        if (first < last)
          keep_codes(*runs_.narrow[field], tile_.run, first, last - first, memory(field, first));
      }
    }
  }

  // --- statistics ---------------------------------------------------------------------------------------------------

  // Advances the statistics of `count` elements from `start` on, in memory and from `place` on in the arrays; those of
  // the tile's neighbours in the arrays only.
  void advance(int64_t start, int64_t count, int64_t place) {
    const bool inside = start >= tile_.start && start + count <= tile_.end &&
                        start + count + kBand <= runs_.lengths[tile_.run];
    if (!inside) fetch(start, count);
    const auto at = [&](int64_t field) {
      return inside ? memory(field, start) : array(kBorder + field);
    };
    const T* grad = at(0);
    const T eps = rates_.eps * rates_.correction2;
    prefetch(grad + kPiece);
    average(at(1), array(kMomentum) + place, count, rates_.beta1, [=](int64_t i) { return grad[i]; }, itself);
    prefetch(at(1) + kPiece);
    average(at(2), array(kDamped) + place, count, rates_.beta2, [=](int64_t i) { return grad[i] * grad[i]; },
            [=](T value) { return value + eps; });
    prefetch(at(2) + kPiece);
    for (int64_t k = 1; k <= kBand; ++k) {
      T *memory = at(2 + k), *own = array(kEdge + k) + place;
      average(memory, own, count, rates_.beta2, [=](int64_t i) { return grad[i] * grad[i + k]; }, itself);
      prefetch(memory + kPiece);
      cut_chains(k, start, count, memory, own);
    }
    if (!inside) keep(start, count);
  }

  template <typename Value, typename Used>
  static void average(T* __restrict__ memory, T* __restrict__ own, int64_t count, double decay, Value value,
                      Used used) {
    const T keep = decay, rest = 1.0 - decay;
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      const T updated = memory[i] * keep + value(i) * rest;
      memory[i] = updated;
      own[i] = used(updated);
    }
  }

  // Fetches the next piece from memory while this one is worked on.
  static void prefetch(const T* next) {
    for (int64_t i = 0; i < kPiece; i += kLine / sizeof(T)) __builtin_prefetch(next + i);
  }

  static T itself(T value) { return value; }
  // Without damping the variance of an element that never had a gradient is 0, and the element stays where it is.
  static T divided(T value, T by) { return by == T(0) ? T(0) : value / by; }

  // Copies gradients and statistics of a stretch that reaches beyond the tile, with zeros beyond its neighbours.
  void fetch(int64_t start, int64_t count) {
    for (int64_t field = 0; field < kFields; ++field)
      for (int64_t i = 0; i < count + (field == 0 ? kBand : 0); ++i)
        array(kBorder + field)[i] = neighbour(field, start + i);
  }

  T neighbour(int64_t field, int64_t position) {
    if (position < tile_.start - kBand || position >= tile_.end + kBand) return T(0);
    const bool left = position < tile_.start, right = position >= tile_.end;
    if (!(left || right)) return *memory(field, position);
    if (field == 0) return runs_.at(field, tile_.run, position);
    return halo_[(2 * (field - 1) + right) * kBand + (right ? position - tile_.end : position - tile_.start + kBand)];
  }

  void keep(int64_t start, int64_t count) {
    const int64_t from = std::max(start, tile_.start), to = std::min(start + count, tile_.end);
    for (int64_t field = 1; field < kFields && from < to; ++field)
      std::copy_n(array(kBorder + field) + from - start, to - from, memory(field, from));
  }

  // Sets edges that would join two chains to zero.
  void cut_chains(int64_t distance, int64_t start, int64_t count, T* memory, T* own) {
    const int64_t chain = runs_.chains[tile_.run];
    if (chain == 0) return;
    const int64_t place = (((runs_.starts[tile_.run] + start) % chain) + chain) % chain;
    for (int64_t last = std::max<int64_t>(0, chain - distance); last < chain; ++last)
      for (int64_t i = (last - place + chain) % chain; i < count; i += chain) memory[i] = own[i] = T(0);
  }

  // --- factors, applied to the momentum from the left ---------------------------------------------------------------

  template <int K = 1>
  void factor(int64_t from, int64_t count) {
    add_order<K>(from, K < kBand ? count + kLead : count);
    if constexpr (K < kBand) factor<K + 1>(from, count);
  }

  // Makes regressions on K neighbours from the regressions on K - 1 of two overlapping windows. A window is kept if it
  // and every window inside it are well conditioned; others stay as they were, but the variance of their last element
  // becomes a NaN, and so does all that is built on it.
  template <int K>
  void add_order(int64_t from, int64_t count) {
    const T gamma = rates_.gamma, nan = std::numeric_limits<T>::quiet_NaN();
    T* const arrays = array(0) + from;
    const auto at = [=](int64_t index, int64_t place) -> T& { return arrays[index * kStride + place]; };
    constexpr bool kOdd = (kBand - K) % 2;
    constexpr int64_t kFrom = kOdd ? kCoefficient : kOtherCoefficient, kTo = kOdd ? kOtherCoefficient : kCoefficient;
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) {
      T partial = at(kEdge + K, j), forward[K], backward[K];
#pragma GCC unroll 32
      for (int i = 1; i < K; ++i) {
        forward[i] = at(kFrom + i, j);
        backward[i] = at(kBefore + i - 1, j + 1);
        partial -= forward[i] * at(kEdge + K - i, j + i);
      }
      const T first = at(K == 1 ? kDamped : kOdd ? kFirst : kOtherFirst, j), last = at(K == 1 ? kDamped : kLast, j + 1);
      const T on_last = partial / last, on_first = partial / first;
      const T of_first = first - on_last * partial, of_last = last - on_first * partial;
      bool kept = of_first > at(kDamped, j) * gamma;
      // The two ends of a single edge have the same relative conditional variance.
      if (K > 1) {
        const T own = at(kLast, j);
        kept = kept & (of_last > at(kDamped, j + K) * gamma) & (own == own);
      }
      const T variance = kept ? of_first : first;
      T residual = at(kMomentum, j);
#pragma GCC unroll 32
      for (int i = 1; i <= K; ++i) {
        const T before = i < K ? forward[i] : T(0);
        const T found = i < K ? forward[i] - on_last * backward[i] : on_last;
        const T chosen = kept ? found : before;
        at(kTo + i, j) = chosen;
        if (K == kBand) residual -= chosen * at(kMomentum, j + i);
      }
      if (K == kBand) {
        at(kWhitened, j) = divided(residual, variance);
      } else {
        at(kOdd ? kOtherFirst : kFirst, j) = variance;
        at(kLast, j) = kept ? of_last : nan;
        // Backward coefficients count from the other end, so that the new one comes first.
        at(kBefore, j) = on_first;
#pragma GCC unroll 32
        for (int i = 1; i < K; ++i) at(kBefore + i, j) = backward[i] - on_first * forward[i];
      }
    }
  }

  // --- direction ----------------------------------------------------------------------------------------------------

  // Multiplies by the factors from the right, and returns the squared norm. Bias corrections are folded into the damping
  // and one factor.
  double direct(int64_t start, int64_t count) {
    const T scale = rates_.correction2 / rates_.correction1;
    T* __restrict__ out = runs_.outs[tile_.run] + start;
    T* const arrays = array(0) + kLead;
    const auto at = [=](int64_t index, int64_t place) { return arrays[index * kStride + place]; };
    double sum = 0.0;
    prefetch(out + kPiece);
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < count; ++j) {
      T value = kBand ? at(kWhitened, j) : divided(at(kMomentum, j), at(kDamped, j));
#pragma GCC unroll 32
      for (int k = 1; k <= kBand; ++k) value -= at(kCoefficient + k, j - k) * at(kWhitened, j - k);
      value *= scale;
      out[j] = value;
      sum += static_cast<double>(value) * static_cast<double>(value);
    }
    return sum;
  }

  double graft_norm(int64_t start, int64_t count) {
    const double scale = 1.0 / (rates_.correction1 * rates_.correction1);
    const T root = 1.0 / std::sqrt(rates_.correction2), graft_eps = rates_.graft_eps, official = kOfficialGraftEps;
    const T* grad = runs_.field(0, tile_.run) + start;
    const T* mean = memory(1, start);
    const T* square = memory(2, start);
    switch (graft_) {
      case kAdam:
        return scale * norm(count, [=](int64_t j) { return mean[j] / (std::sqrt(square[j]) * root + graft_eps); });
      case kAdamOfficial:
        return scale * norm(count, [=](int64_t j) { return mean[j] / (std::sqrt(square[j]) + official); });
      case kMomentumGraft:
        return scale * norm(count, [=](int64_t j) { return mean[j]; });
      case kSgd:
        return norm(count, [=](int64_t j) { return grad[j]; });
      default:
        return 0.0;
    }
  }

  template <typename Value>
  static double norm(int64_t count, Value graft) {
    double sum = 0.0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < count; ++j) {
      const T value = graft(j);
      sum += static_cast<double>(value) * static_cast<double>(value);
    }
    return sum;
  }

  const Runs<T>& runs_;
  const Rates& rates_;
  const int graft_;
  std::vector<T> memory_, opened_[kFields];
  Tile tile_{};
  const T* halo_ = nullptr;
};

template <typename T>
void sonew_directions(const Runs<T>& runs, const Rates& rates, int graft, double* squares, double* graft_squares,
                      int64_t tile_size, int threads) {
  // Tiles begin with blocks where there are any; those of all statistics lie alike.
  const auto with_blocks = std::find_if(runs.narrow, runs.narrow + kFields, [](const NarrowRuns* narrow) {
    return narrow && narrow->kind != kBfloat16;
  });
  const auto tiles = with_blocks == runs.narrow + kFields
                         ? tiles_of(runs.runs, runs.lengths, tile_size)
                         : tiles_of_blocks(runs.runs, runs.lengths, (*with_blocks)->firsts, tile_size);
  constexpr int64_t halo_size = 2 * (2 + kBand) * kBand;
  std::vector<T> halos(tiles.size() * halo_size);
  std::vector<double> parts(tiles.size()), graft_parts(tiles.size());
#pragma omp parallel num_threads(threads)
  {
    // Halos are copied before any tile writes, because directions need the neighbours' statistics of before the step.
#pragma omp for schedule(static)
    for (size_t index = 0; index < tiles.size(); ++index)
      for (int64_t field = 0; field < 2 + kBand; ++field)
        for (int64_t i = 0; i < kBand; ++i) {
          const Tile& tile = tiles[index];
          T* halo = &halos[index * halo_size + 2 * field * kBand];
          halo[i] = runs.at(field + 1, tile.run, tile.start - kBand + i);
          halo[kBand + i] = runs.at(field + 1, tile.run, tile.end + i);
        }
    Pass<T> pass(runs, rates, graft, tile_size);
#pragma omp for schedule(static)
    for (size_t index = 0; index < tiles.size(); ++index)
      pass.run(tiles[index], halos.data() + index * halo_size, &parts[index], &graft_parts[index]);
  }
  add_up(tiles, parts, runs.runs, squares);
  add_up(tiles, graft_parts, runs.runs, graft_squares);
}

// What a call works on, as Python describes it.
struct Described {
  int64_t runs, tile_size, threads, graft;
  const int64_t *lengths, *starts, *chains;
  void *const *fields, *const *margins, *const *outs;
  const NarrowRuns* const* narrow;
  void* const* loose;
  const int64_t* ends;
  const Rates* rates;
};

template <typename T>
void described_directions(const Described& call, double* squares, double* graft_squares) {
  const auto typed = [](void* const* pointers) { return reinterpret_cast<T* const*>(pointers); };
  const Runs<T> runs{call.lengths, call.starts,        call.chains, typed(call.fields),
                     typed(call.margins), typed(call.outs), call.narrow, typed(call.loose),
                     call.ends,    call.runs};
  sonew_directions<T>(runs, *call.rates, call.graft, squares, graft_squares, call.tile_size, call.threads);
}

}  // namespace

extern "C" {
void sonew_directions_float32(const Described* call, double* squares, double* graft_squares) {
  described_directions<float>(*call, squares, graft_squares);
}
void sonew_directions_float64(const Described* call, double* squares, double* graft_squares) {
  described_directions<double>(*call, squares, graft_squares);
}
}
