// SONew in one pass: statistics in place, directions and their norms, any band, runs cut anywhere.
//
// Compiled without contraction of products and sums, and in the order of the operations of rankwise/sonew/banded.py:
// an element has the same bits wherever its run was cut, and those of the plain functions.

#include "tiles.h"

#include <cmath>
#include <cstring>

namespace {

// Smallest diagonal: an element that never had a gradient gives 0 / kTiny and not 0 / 0.
constexpr double kTiny = 1e-30;
constexpr double kOfficialGraftEps = 1e-8;

enum Graft { kNone = 0, kAdam = 1, kAdamOfficial = 2, kMomentum = 3, kSgd = 4 };

struct Rates {
  double beta1, beta2, correction1, correction2, eps, gamma, graft_eps;
};

// Of all runs: fields are gradient, momentum, diagonal and the edges by distance.
template <typename T>
struct Runs {
  const int64_t* lengths;
  const int64_t* starts;
  const int64_t* chains;      // 0: the parameter is one chain
  T* const* fields;           // [field * runs + run]
  const T* const* margins;    // [2 * run + side], (fields, band) each; null: zeros
  T* const* outs;
  int64_t runs, band;

  int64_t count_fields() const { return 3 + band; }
  T* field(int64_t index, int64_t run) const { return fields[index * runs + run]; }

  // An element of a run or of its margins.
  T at(int64_t index, int64_t run, int64_t position) const {
    if (position >= 0 && position < lengths[run]) return field(index, run)[position];
    const bool right = position >= 0;
    const T* margin = margins[2 * run + right];
    const int64_t place = right ? position - lengths[run] : position + band;
    return margin ? margin[index * band + place] : T(0);
  }
};

// One thread's arrays of a tile and `band` elements on either side.
template <typename T>
struct Workspace {
  int64_t length;
  std::vector<T> memory;

  // Room for the elements after the last one, which are read and mean nothing.
  Workspace(int64_t tile_size, int64_t band) : length(tile_size + 3 * band + 16), memory(length * (13 + 4 * band)) {}
  T* array(int64_t index) { return memory.data() + index * length; }
};

template <typename T>
class Pass {
 public:
  Pass(const Runs<T>& runs, const Rates& rates, int graft, Workspace<T>& space)
      : runs_(runs), rates_(rates), graft_(graft), band_(runs.band), space_(space) {
    int64_t next = 0;
    for (T** array : {&grad_, &momentum_, &diagonal_, &whitened_, &damped_, &schur_, &first_, &last_, &partial_,
                      &on_last_, &on_first_, &spare_last_, &spare_sound_})
      *array = space_.array(next++);
    edges_ = next;
    coefficients_ = edges_ + band_;
    after_ = coefficients_ + band_;
    before_ = after_ + band_;
    sound_ = whitened_;  // not needed at the same time
  }

  // `halo` has the old statistics of `band` elements on the left and on the right.
  void run(const Tile& tile, const T* halo, double* square, double* graft_square) {
    tile_ = tile;
    count_ = tile.end - tile.start;
    length_ = count_ + 2 * band_;
    advance(halo);
    if (band_ == 0) whiten_diagonal();
    else if (band_ == 1) whiten_tridiagonal();
    else whiten_banded();
    *square = direct();
    *graft_square = graft_norm();
  }

 private:
  T* edge(int64_t distance) { return space_.array(edges_ + distance - 1); }
  T* coefficient(int64_t distance) { return space_.array(coefficients_ + distance - 1); }
  T* after(int64_t index) { return space_.array(after_ + index); }
  T* before(int64_t index) { return space_.array(before_ + index); }

  // --- statistics ---------------------------------------------------------------------------------------------------

  // Those of the tile, in memory and in the workspace; those of its neighbours in the workspace only.
  void advance(const T* halo) {
    for (int64_t i = 0; i < band_; ++i) {
      grad_[i] = runs_.at(0, tile_.run, tile_.start - band_ + i);
      grad_[band_ + count_ + i] = runs_.at(0, tile_.run, tile_.end + i);
      grad_[length_ + i] = T(0);
    }
    std::memcpy(grad_ + band_, runs_.field(0, tile_.run) + tile_.start, count_ * sizeof(T));
    average(0, momentum_, halo, [](const T* grad, int64_t i) { return grad[i]; }, rates_.beta1);
    average(1, diagonal_, halo, [](const T* grad, int64_t i) { return grad[i] * grad[i]; }, rates_.beta2);
    for (int64_t k = 1; k <= band_; ++k) {
      average(1 + k, edge(k), halo, [k](const T* grad, int64_t i) { return grad[i] * grad[i + k]; }, rates_.beta2);
      cut_chains(k);
    }
  }

  template <typename Value>
  void average(int64_t index, T* statistic, const T* halo, Value value, double decay) {
    const T keep = decay, rest = 1.0 - decay;
    const T* __restrict__ grad = grad_;
    T* __restrict__ own = statistic;
    for (int64_t i = 0; i < band_; ++i) {
      const int64_t right = band_ + count_ + i;
      own[i] = halo[2 * index * band_ + i] * keep + value(grad, i) * rest;
      own[right] = halo[(2 * index + 1) * band_ + i] * keep + value(grad, right) * rest;
    }
    T* __restrict__ memory = runs_.field(index + 1, tile_.run) + tile_.start;
    own += band_;
    for (int64_t i = 0; i < count_; ++i) {
      const T updated = memory[i] * keep + value(grad, band_ + i) * rest;
      memory[i] = updated;
      own[i] = updated;
    }
  }

  // Edges that would join two chains are zero.
  void cut_chains(int64_t distance) {
    const int64_t chain = runs_.chains[tile_.run];
    if (chain == 0) return;
    T* memory = runs_.field(distance + 2, tile_.run) + tile_.start;
    T* own = edge(distance);
    const int64_t position = runs_.starts[tile_.run] + tile_.start - band_;
    const int64_t place = ((position % chain) + chain) % chain;
    for (int64_t last = std::max<int64_t>(0, chain - distance); last < chain; ++last)
      for (int64_t i = (last - place + chain) % chain; i < length_; i += chain) {
        own[i] = T(0);
        if (i >= band_ && i < band_ + count_) memory[i - band_] = T(0);
      }
  }

  // --- factors, applied to the momentum from the left ---------------------------------------------------------------

  T damping() const { return rates_.eps * rates_.correction2; }
  // Below it nothing is added that would keep a zero from being divided by.
  T smallest() const { return rates_.eps * rates_.correction2 < kTiny ? T(kTiny) : T(0); }

  static T larger(T a, T b) { return a < b ? b : a; }

  void whiten_diagonal() {
    const T eps = damping(), tiny = smallest();
    for (int64_t i = 0; i < count_; ++i) whitened_[i] = momentum_[i] / larger(diagonal_[i] + eps, tiny);
  }

  void whiten_tridiagonal() {
    const T eps = damping(), tiny = smallest(), gamma = rates_.gamma;
    const T* __restrict__ momentum = momentum_;
    const T* __restrict__ diagonal = diagonal_;
    const T* __restrict__ edges = edge(1);
    T* __restrict__ coefficients = coefficient(1);
    T* __restrict__ whitened = whitened_;
    for (int64_t i = 0; i + 1 < length_; ++i) {
      const T here = larger(diagonal[i] + eps, tiny), next = larger(diagonal[i + 1] + eps, tiny);
      const T slope = edges[i] / next, variance = here - slope * edges[i];
      // A NaN compares as degenerate.
      const bool kept = variance > here * gamma;
      const T coefficient = kept ? slope : T(0);
      coefficients[i] = coefficient;
      whitened[i] = (momentum[i] - coefficient * momentum[i + 1]) / (kept ? variance : here);
    }
  }

  void whiten_banded() {
    const T eps = damping(), tiny = smallest();
    const T* __restrict__ diagonal = diagonal_;
    T* __restrict__ damped = damped_;
    for (int64_t i = 0; i < length_; ++i) damped[i] = larger(diagonal[i] + eps, tiny);
    for (T* copy : {schur_, first_, last_}) std::memcpy(copy, damped_, length_ * sizeof(T));
    std::fill(sound_, sound_ + length_, T(1));
    for (int64_t k = 1; k <= band_; ++k) add_order(k);
    const int64_t end = band_ + count_;
    T* __restrict__ whitened = whitened_;
    std::memcpy(whitened, momentum_, end * sizeof(T));
    for (int64_t k = 1; k <= band_; ++k) {
      const T* __restrict__ own = coefficient(k);
      const T* __restrict__ next = momentum_ + k;
      for (int64_t j = 0; j < end; ++j) whitened[j] -= own[j] * next[j];
    }
    const T* __restrict__ schur = schur_;
    for (int64_t j = 0; j < end; ++j) whitened[j] /= schur[j];
  }

  // The regressions on k neighbours from those on k - 1 of two overlapping windows.
  void add_order(int64_t k) {
    const int64_t windows = length_ - k;
    const bool more = k < band_;
    T* __restrict__ partial = partial_;
    std::memcpy(partial, edge(k), windows * sizeof(T));
    for (int64_t i = 1; i < k; ++i) {
      const T* __restrict__ coefficient = after(i - 1);
      const T* __restrict__ other = edge(k - i) + i;
      for (int64_t j = 0; j < windows; ++j) partial[j] -= coefficient[j] * other[j];
    }
    T* __restrict__ on_last = on_last_;
    T* __restrict__ on_first = on_first_;
    const T* __restrict__ first = first_;
    const T* __restrict__ last = last_;
    for (int64_t j = 0; j < windows; ++j) {
      on_last[j] = partial[j] / last[j + 1];
      on_first[j] = partial[j] / first[j];
    }
    for (int64_t i = 0; i + 1 < k; ++i) {
      T* __restrict__ own = after(i);
      T* __restrict__ other = before(i);
      for (int64_t j = 0; j < windows; ++j) {
        const T forward = own[j], backward = other[j + 1];
        own[j] = forward - on_last[j] * backward;
        other[j] = backward - on_first[j] * forward;
      }
    }
    std::memcpy(after(k - 1), on_last, windows * sizeof(T));
    if (more) shift_before(k, windows);
    judge(k, windows);
    T* newest = coefficient(k);
    std::fill(newest, newest + windows, T(0));
    for (int64_t i = 1; i <= k; ++i) keep_sound(coefficient(i), after(i - 1), windows);
  }

  // The backward coefficients count from the other end: the new one comes first.
  void shift_before(int64_t k, int64_t windows) {
    for (int64_t i = k - 1; i > 0; --i) std::memcpy(before(i), before(i - 1), windows * sizeof(T));
    std::memcpy(before(0), on_first_, windows * sizeof(T));
  }

  // Keeps the windows that are well conditioned, with every window inside them.
  void judge(int64_t k, int64_t windows) {
    // The two ends of a single edge have the same relative conditional variance.
    const auto apply = k == 1 ? compare<false> : compare<true>;
    apply(windows, rates_.gamma, partial_, on_last_, on_first_, damped_, damped_ + k, last_ + 1, sound_, sound_ + 1,
          first_, spare_last_, spare_sound_, schur_);
    std::swap(last_, spare_last_);
    std::swap(sound_, spare_sound_);
  }

  // A function of its own: compilers trust `__restrict__` in parameters only.
  template <bool BothEnds>
  static void compare(int64_t windows, T gamma, const T* __restrict__ partial, const T* __restrict__ on_last,
                      const T* __restrict__ on_first, const T* __restrict__ damped, const T* __restrict__ damped_end,
                      const T* __restrict__ old_last, const T* __restrict__ old_sound,
                      const T* __restrict__ next_sound, T* __restrict__ first, T* __restrict__ last,
                      T* __restrict__ sound, T* __restrict__ schur) {
    for (int64_t j = 0; j < windows; ++j) {
      const T of_first = first[j] - on_last[j] * partial[j];
      const T of_last = old_last[j] - on_first[j] * partial[j];
      // Ones and zeros, which multiply; a NaN compares as degenerate.
      T kept = old_sound[j] * next_sound[j] * (of_first > damped[j] * gamma ? T(1) : T(0));
      if (BothEnds) kept *= of_last > damped_end[j] * gamma ? T(1) : T(0);
      sound[j] = kept;
      schur[j] = kept > T(0) ? of_first : schur[j];
      // What is built on a degenerate window is dropped, but must stay a number until then.
      first[j] = kept > T(0) ? of_first : T(1);
      last[j] = kept > T(0) ? of_last : T(1);
    }
  }

  void keep_sound(T* __restrict__ kept, const T* __restrict__ found, int64_t windows) const {
    const T* __restrict__ sound = sound_;
    for (int64_t j = 0; j < windows; ++j) kept[j] = sound[j] > T(0) ? found[j] : kept[j];
  }

  // --- direction ----------------------------------------------------------------------------------------------------

  // From the right; the squared norm. Bias corrections are folded into the damping and one factor.
  double direct() {
    T* out = runs_.outs[tile_.run] + tile_.start;
    const T* whitened = whitened_ + band_;
    if (band_ == 0) return scaled(out, [=](int64_t j) { return whitened[j]; });
    if (band_ == 1) {
      const T* own = coefficient(1);
      return scaled(out, [=](int64_t j) { return whitened[j] - own[j] * whitened[j - 1]; });
    }
    std::memcpy(out, whitened, count_ * sizeof(T));
    for (int64_t k = 1; k <= band_; ++k) subtract(out, coefficient(k) + band_ - k, whitened - k);
    return scaled(out, [=](int64_t j) { return out[j]; });
  }

  void subtract(T* __restrict__ out, const T* __restrict__ factor, const T* __restrict__ value) const {
    for (int64_t j = 0; j < count_; ++j) out[j] -= factor[j] * value[j];
  }

  // Writes the values, corrected; their squared norm.
  template <typename Value>
  double scaled(T* out, Value value) const {
    const T scale = rates_.correction2 / rates_.correction1;
    double sum = 0.0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < count_; ++j) {
      const T result = value(j) * scale;
      out[j] = result;
      sum += static_cast<double>(result) * static_cast<double>(result);
    }
    return sum;
  }

  double graft_norm() const {
    const double scale = 1.0 / (rates_.correction1 * rates_.correction1);
    const T root = 1.0 / std::sqrt(rates_.correction2), graft_eps = rates_.graft_eps, official = kOfficialGraftEps;
    switch (graft_) {
      case kAdam:
        return scale * norm([=](T, T mean, T square) { return mean / (std::sqrt(square) * root + graft_eps); });
      case kAdamOfficial:
        return scale * norm([=](T, T mean, T square) { return mean / (std::sqrt(square) + official); });
      case kMomentum:
        return scale * norm([=](T, T mean, T) { return mean; });
      case kSgd:
        return norm([=](T grad, T, T) { return grad; });
      default:
        return 0.0;
    }
  }

  template <typename Value>
  double norm(Value graft) const {
    double sum = 0.0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = band_; j < band_ + count_; ++j) {
      const T value = graft(grad_[j], momentum_[j], diagonal_[j]);
      sum += static_cast<double>(value) * static_cast<double>(value);
    }
    return sum;
  }

  const Runs<T>& runs_;
  const Rates& rates_;
  const int graft_;
  const int64_t band_;
  Workspace<T>& space_;
  Tile tile_{};
  int64_t count_ = 0, length_ = 0;
  T *grad_, *momentum_, *diagonal_, *whitened_, *damped_, *schur_, *first_, *last_, *partial_, *on_last_, *on_first_;
  T *spare_last_, *spare_sound_, *sound_;
  int64_t edges_, coefficients_, after_, before_;
};

template <typename T>
void sonew_directions(const Runs<T>& runs, const Rates& rates, int graft, double* squares, double* graft_squares,
                      int64_t tile_size, int threads) {
  const auto tiles = tiles_of(runs.runs, runs.lengths, tile_size);
  const int64_t statistics = 2 + runs.band, halo_size = 2 * statistics * runs.band;
  std::vector<T> halos(tiles.size() * halo_size);
  std::vector<double> parts(tiles.size()), graft_parts(tiles.size());
#pragma omp parallel num_threads(threads)
  {
    // Before any tile writes its own: what neighbours have must be that of before the step.
#pragma omp for schedule(static)
    for (size_t index = 0; index < tiles.size(); ++index)
      for (int64_t field = 0; field < statistics; ++field)
        for (int64_t i = 0; i < runs.band; ++i) {
          const Tile& tile = tiles[index];
          T* halo = &halos[index * halo_size + 2 * field * runs.band];
          halo[i] = runs.at(field + 1, tile.run, tile.start - runs.band + i);
          halo[runs.band + i] = runs.at(field + 1, tile.run, tile.end + i);
        }
    Workspace<T> space(tile_size, runs.band);
    Pass<T> pass(runs, rates, graft, space);
#pragma omp for schedule(static)
    for (size_t index = 0; index < tiles.size(); ++index)
      pass.run(tiles[index], halos.data() + index * halo_size, &parts[index], &graft_parts[index]);
  }
  add_up(tiles, parts, runs.runs, squares);
  add_up(tiles, graft_parts, runs.runs, graft_squares);
}

}  // namespace

#define FORM(T, SUFFIX)                                                                                               \
  void sonew_directions_##SUFFIX(int64_t runs, const int64_t* lengths, const int64_t* starts, const int64_t* chains,  \
                                 int64_t band, T* const* fields, const T* const* margins, T* const* outs,             \
                                 const Rates* rates, int graft, double* squares, double* graft_squares,               \
                                 int64_t tile_size, int threads) {                                                    \
    sonew_directions<T>({lengths, starts, chains, fields, margins, outs, runs, band}, *rates, graft, squares,         \
                        graft_squares, tile_size, threads);                                                                      \
  }

extern "C" {
FORM(float, float32)
FORM(double, float64)
}
