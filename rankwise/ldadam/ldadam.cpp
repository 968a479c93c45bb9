// LDAdam's step on whole matrices: every matrix by one thread where there are enough of them, else by all.

#include "low_rank.h"
#include "subspace.h"

#include <numeric>

namespace {

struct Matrix {
  int64_t rows, columns, rank;
  int64_t right;        // projected from the right: it is tall, and its transpose is what the formulas mean
  const float* added;   // gradient that goes into `matrix` first; null: it is there already
  float* matrix;        // C; with `feedback` it becomes the error buffer
  float* weight;        // null: leave
  float* basis;         // (short, rank), moved
  float* first;         // (rank, long), moved
  float* second;        // (rank, long), moved
  float* direction;     // (rank, long), or null
  int64_t feedback;
  double lr, weight_matrix, weight_momentum;
  MomentRates rates;
  double kept;          // out: share of the old subspace in the new one
  int64_t done;         // out: 0 where Cholesky failed; then only `added` has been
};

class Step {
 public:
  Step(Matrix& matrix, const Limits& limits, int threads)
      : own_(matrix), limits_(limits), threads_(threads), rank_(matrix.rank),
        short_(matrix.right ? matrix.columns : matrix.rows), long_(matrix.right ? matrix.rows : matrix.columns) {}

  void run() {
    own_.done = follow();
    if (!own_.done) return;
    measure_rotation();
    project();
    std::vector<float> spare(own_.direction ? 0 : rank_ * long_);
    float* direction = own_.direction ? own_.direction : spare.data();
    carry_moments(coordinates_.data(), rotation_.data(), own_.first, own_.second, direction, rank_, long_, own_.rates,
                  threads_);
    transpose(image_.data(), rank_, short_, own_.basis);
    if (own_.feedback) subtract(own_.matrix, own_.first, 1.0f);
    if (own_.weight) subtract(own_.weight, direction, own_.lr);
  }

 private:
  // The next basis into `image_`, its rows orthonormal: one power iteration, without forming B.
  bool follow() {
    coordinates_.resize(rank_ * long_);
    image_.resize(rank_ * short_);
    std::vector<float> turned(rank_ * std::max(short_, long_));
    transpose(own_.basis, short_, rank_, turned.data());
    multiply_long(own_.basis, turned.data(), own_.added);
    mix(coordinates_, own_.first);
    if (!orthonormalize(coordinates_.data(), rank_, long_, 1, limits_, threads_)) return false;
    add_momentum();
    transpose(coordinates_.data(), rank_, long_, turned.data());
    multiply_short(coordinates_.data(), turned.data());
    for (int64_t i = 0; i < rank_ * short_; ++i) image_[i] = image_[i] * matrix_weight() + momentum_[i];
    return orthonormalize(image_.data(), rank_, short_, 2, limits_, threads_);
  }

  float matrix_weight() const { return own_.weight_matrix; }

  // coordinates = U^T C, from the basis and its transpose.
  void multiply_long(const float* basis, const float* transposed, const float* added) {
    if (own_.right)
      right_product(own_.matrix, added, own_.rows, own_.columns, transposed, rank_, coordinates_.data(), threads_);
    else
      left_product(own_.matrix, added, own_.rows, own_.columns, basis, rank_, coordinates_.data(), threads_);
  }

  // image = X C^T, from the rows of X and their transpose.
  void multiply_short(const float* rows, const float* transposed) {
    if (own_.right)
      left_product(own_.matrix, nullptr, own_.rows, own_.columns, transposed, rank_, image_.data(), threads_);
    else
      right_product(own_.matrix, nullptr, own_.rows, own_.columns, rows, rank_, image_.data(), threads_);
  }

  void mix(std::vector<float>& values, const float* momentum) {
    const float wm = own_.weight_momentum;
    for (size_t i = 0; i < values.size(); ++i) values[i] = values[i] * matrix_weight() + wm * momentum[i];
  }

  // momentum = w_M (X M^T) U^T, (rank, short).
  void add_momentum() {
    std::vector<float> small(rank_ * rank_);
    for (int64_t k = 0; k < rank_; ++k)
      for (int64_t l = 0; l < rank_; ++l) {
        Vector sum = {};
        for (int64_t j = 0; j < long_; j += kLanes)
          sum += load_some(&coordinates_[k * long_ + j], long_ - j) * load_some(own_.first + l * long_ + j, long_ - j);
        small[k * rank_ + l] = own_.weight_momentum * lane_sum(sum);
      }
    momentum_.assign(rank_ * short_, 0.0f);
    for (int64_t i = 0; i < short_; ++i)
      for (int64_t k = 0; k < rank_; ++k) {
        float sum = 0.0f;
        for (int64_t l = 0; l < rank_; ++l) sum += small[k * rank_ + l] * own_.basis[i * rank_ + l];
        momentum_[k * short_ + i] = sum;
      }
  }

  // R = U^T U_prev.
  void measure_rotation() {
    rotation_.assign(rank_ * rank_, 0.0f);
    for (int64_t i = 0; i < short_; ++i)
      for (int64_t k = 0; k < rank_; ++k)
        for (int64_t l = 0; l < rank_; ++l) rotation_[k * rank_ + l] += image_[k * short_ + i] * own_.basis[i * rank_ + l];
    own_.kept = std::inner_product(rotation_.begin(), rotation_.end(), rotation_.begin(), 0.0) / rank_;
  }

  void project() {
    std::vector<float> basis(rank_ * short_);
    transpose(image_.data(), rank_, short_, basis.data());
    multiply_long(basis.data(), image_.data(), nullptr);
  }

  // target -= scale U factor.
  void subtract(float* target, const float* factor, float scale) {
    std::vector<float> scaled(factor, factor + rank_ * long_);
    if (scale != 1.0f)
      for (float& value : scaled) value *= scale;
    if (!own_.right) return subtract_product(target, own_.rows, own_.columns, own_.basis, rank_, scaled.data(), threads_);
    std::vector<float> turned(rank_ * long_);
    transpose(scaled.data(), rank_, long_, turned.data());
    subtract_product(target, own_.rows, own_.columns, turned.data(), rank_, image_.data(), threads_);
  }

  Matrix& own_;
  const Limits& limits_;
  const int threads_;
  const int64_t rank_, short_, long_;
  std::vector<float> coordinates_, image_, momentum_, rotation_;
};

}  // namespace

extern "C" {

void ldadam_steps(int64_t count, Matrix* matrices, double first_limit, double second_limit, int threads) {
  const Limits limits{first_limit, second_limit};
  if (count < 2 * threads) {
    for (int64_t index = 0; index < count; ++index) Step(matrices[index], limits, threads).run();
    return;
  }
  std::vector<int64_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  const auto size = [&](int64_t index) { return matrices[index].rows * matrices[index].columns * matrices[index].rank; };
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return size(a) > size(b); });
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (int64_t index = 0; index < count; ++index) Step(matrices[order[index]], limits, 1).run();
}

void subtract_rows_product(float* matrix, int64_t rows, int64_t columns, const float* left, int64_t rank,
                           const float* right, int threads) {
  subtract_product(matrix, rows, columns, left, rank, right, threads);
}

}  // extern "C"
