// LDAdam's low-dimensional part: orthonormal rows by Cholesky QR, and Adam's moments carried into a new basis.
//
// Everything is (rank, columns), row-major and contiguous. No result depends on the number of threads.
#pragma once

#include "vectors.h"

#include <algorithm>
#include <vector>

constexpr int64_t kMaxRank = 64;
constexpr int64_t kSumColumns = 512;  // whose products are added up apart

inline double lane_sum(Vector value) {
  double sum = 0.0;
  for (int lane = 0; lane < kLanes; ++lane) sum += value[lane];
  return sum;
}

// Rows divided by their largest entries; rows of zeros stay.
inline void scale_rows(float* rows, int64_t rank, int64_t columns) {
  for (int64_t k = 0; k < rank; ++k) {
    float* row = rows + k * columns;
    float peak = 0.0f, sum = 0.0f;
#pragma omp simd reduction(max : peak) reduction(+ : sum)
    for (int64_t j = 0; j < columns; ++j) {
      peak = std::max(peak, std::fabs(row[j]));
      sum += row[j] - row[j];
    }
    // The sum is zero but for infinities and NaN, which a maximum may lose.
    const float divisor = (peak > 0.0f ? peak : 1.0f) + sum;
#pragma omp simd
    for (int64_t j = 0; j < columns; ++j) row[j] /= divisor;
  }
}

inline void gram_of_columns(const float* rows, int64_t rank, int64_t columns, int64_t start, int64_t end,
                            double* gram) {
  for (int64_t k = 0; k < rank; ++k)
    for (int64_t first = 0; first <= k; first += 4) {
      const int64_t count = std::min<int64_t>(4, k + 1 - first);
      Vector sums[4] = {};
      for (int64_t j = start; j < end; j += kLanes) {
        const Vector own = load_some(rows + k * columns + j, end - j);
        for (int64_t l = 0; l < count; ++l) sums[l] += own * load_some(rows + (first + l) * columns + j, end - j);
      }
      for (int64_t l = 0; l < count; ++l) gram[k * rank + first + l] = lane_sum(sums[l]);
    }
}

// Lower triangular factor in place; false where it cannot be trusted.
inline bool factorize(double* gram, int64_t rank, double min_diagonal) {
  for (int64_t k = 0; k < rank; ++k) {
    const double length = std::sqrt(gram[k * rank + k]);
    for (int64_t l = 0; l <= k; ++l) {
      double sum = gram[k * rank + l];
      for (int64_t i = 0; i < l; ++i) sum -= gram[k * rank + i] * gram[l * rank + i];
      if (l < k) {
        gram[k * rank + l] = sum / gram[l * rank + l];
        continue;
      }
      gram[k * rank + k] = std::sqrt(sum);
      // Written so that a NaN fails.
      if (!(sum > 0.0) || !(gram[k * rank + k] >= min_diagonal * length)) return false;
    }
  }
  return true;
}

inline void solve_columns(float* rows, int64_t rank, int64_t columns, int64_t start, int64_t end, const float* factor,
                          const float* inverses) {
  for (int64_t j = start; j < end; j += kLanes) {
    Vector solved[kMaxRank];
    for (int64_t k = 0; k < rank; ++k) {
      Vector value = load_some(rows + k * columns + j, end - j);
      for (int64_t l = 0; l < k; ++l) value -= solved[l] * factor[k * rank + l];
      solved[k] = value * inverses[k];
      store_some(rows + k * columns + j, solved[k], end - j);
    }
  }
}

inline bool cholesky_pass(float* rows, int64_t rank, int64_t columns, double min_diagonal, int threads) {
  const int64_t chunks = (columns + kSumColumns - 1) / kSumColumns, squares = rank * rank;
  std::vector<double> parts(chunks * squares, 0.0), gram(squares, 0.0);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t chunk = 0; chunk < chunks; ++chunk)
    gram_of_columns(rows, rank, columns, chunk * kSumColumns, std::min(columns, (chunk + 1) * kSumColumns),
                    &parts[chunk * squares]);
  for (int64_t chunk = 0; chunk < chunks; ++chunk)
    for (int64_t i = 0; i < squares; ++i) gram[i] += parts[chunk * squares + i];
  if (!factorize(gram.data(), rank, min_diagonal)) return false;
  std::vector<float> factor(gram.begin(), gram.end()), inverses(rank);
  for (int64_t k = 0; k < rank; ++k) inverses[k] = static_cast<float>(1.0 / gram[k * rank + k]);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t chunk = 0; chunk < chunks; ++chunk)
    solve_columns(rows, rank, columns, chunk * kSumColumns, std::min(columns, (chunk + 1) * kSumColumns),
                  factor.data(), inverses.data());
  return true;
}

// Smallest diagonal entries of the factors of the first and the second pass that are accepted.
struct Limits {
  double first, second;
};

// Orthonormalises rows in their order, in one or two passes; false where the result must not be used.
inline bool orthonormalize(float* rows, int64_t rank, int64_t columns, int passes, const Limits& limits, int threads) {
  scale_rows(rows, rank, columns);
  if (!cholesky_pass(rows, rank, columns, limits.first, threads)) return false;
  return passes < 2 || cholesky_pass(rows, rank, columns, limits.second, threads);
}

// `past` and `present`: bias corrections of the two moments before and after the step.
struct MomentRates {
  double beta1, beta2, past1, past2, present1, present2, eps, share;
};

// `low_rank_moments` of rankwise/ldadam/rule.py, of a step after the first; the moments change in place.
inline void carry_moments(const float* projected, const float* rotation, float* first, float* second, float* direction,
                          int64_t rank, int64_t columns, const MomentRates& rates, int threads) {
  const float beta1 = rates.beta1, beta2 = rates.beta2, rest1 = 1.0 - rates.beta1, rest2 = 1.0 - rates.beta2;
  const float past1 = 1.0 / rates.past1, past2 = 1.0 / rates.past2, bias2 = rates.past2;
  const float present1 = 1.0 / rates.present1, present2 = 1.0 / rates.present2;
  const float eps = rates.eps, share = rates.share;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t j = 0; j < columns; j += kLanes) {
    const int64_t lanes = columns - j;
    Vector momenta[kMaxRank], variances[kMaxRank];
    for (int64_t k = 0; k < rank; ++k) {
      momenta[k] = load_some(first + k * columns + j, lanes);
      const Vector mean = momenta[k] * past1;
      variances[k] = load_some(second + k * columns + j, lanes) * past2 - mean * mean;
    }
    for (int64_t k = 0; k < rank; ++k) {
      Vector rotated = {}, variance = {};
      for (int64_t l = 0; l < rank; ++l) {
        const float turn = rotation[k * rank + l];
        rotated += momenta[l] * turn;
        variance += variances[l] * (turn * turn);
      }
      const Vector mean = rotated * past1;
      const Vector spread = variance + mean * mean;
      const Vector carried = (spread < 0.0f ? -spread : spread) * bias2;
      const int64_t at = k * columns + j;
      const Vector gradient = load_some(projected + at, lanes) - rotated * share;
      const Vector moment = rotated * beta1 + gradient * rest1;
      const Vector square = carried * beta2 + gradient * gradient * rest2;
      store_some(first + at, moment, lanes);
      store_some(second + at, square, lanes);
      store_some(direction + at, moment * present1 / (square_root(square * present2) + eps), lanes);
    }
  }
}
