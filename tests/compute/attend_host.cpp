// Runs the kernel of server/attend.cu without a GPU: one host thread for each of a block's, one block at a time.
// Two rows of eight heads over buffers that are longer than what is read; prints the largest difference from plain
// arithmetic. THREADS, D, LENGTH and SHIFT (elements by which keys and values are off an even address) come from the
// command line.

#include <array>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <random>
#include <thread>
#include <vector>

using T = float;
using Shape = std::array<int32_t, 10>;
using Strides = std::array<int64_t, 10>;

struct uint4 {
  unsigned x, y, z, w;
};
struct Index {
  int x, y;
};

constexpr int GROUP = 4, TEAM = D / (16 / sizeof(T));
thread_local Index threadIdx, blockIdx;
Index gridDim;
std::unique_ptr<std::barrier<>> whole;
std::array<std::unique_ptr<std::barrier<>>, THREADS / TEAM> teams;
float exchanged[THREADS];

void __syncthreads() { whole->arrive_and_wait(); }

struct Tile {
  float shfl_xor(float value, int other) const {
    auto& team = *teams[threadIdx.x / TEAM];
    exchanged[threadIdx.x] = value;
    team.arrive_and_wait();
    const float found = exchanged[threadIdx.x ^ other];
    team.arrive_and_wait();
    return found;
  }
};

namespace cg {
inline int this_thread_block() { return 0; }
template <int N>
Tile tiled_partition(int) {
  static_assert(N == TEAM);
  return {};
}
}  // namespace cg

#define SCALE 0.125f
#define __shared__ static

void attend(const T* queries, Strides queries_strides, const T* keys, Shape keys_shape, Strides keys_strides,
            const T* values, Strides values_strides, const bool* mask, Shape mask_shape, Strides mask_strides, T* out) {
#include "attend.cu"
}

constexpr int ROWS = 2, HEADS = 8, SHARED = HEADS / GROUP, ROOM = LENGTH + 7;

double expected(const T* query, const T* keys, const T* values, int from, int d) {
  double total = 0, sum = 0;
  for (int i = from; i < LENGTH; i++) {
    double score = 0;
    for (int j = 0; j < D; j++) score += 0.125 * query[j] * keys[i * D + j];
    total += std::exp(score);
    sum += std::exp(score) * values[i * D + d];
  }
  return sum / total;
}

int main() {
  std::mt19937 draw(1);
  std::normal_distribution<float> normal;
  auto random = [&](size_t count) {
    std::vector<T> found(count);
    for (auto& one : found) one = normal(draw);
    return found;
  };
  auto queries = random(ROWS * HEADS * D), out = random(ROWS * HEADS * D);
  auto keys = random(ROWS * SHARED * ROOM * D + SHIFT), values = random(ROWS * SHARED * ROOM * D + SHIFT);
  const T *k = keys.data() + 3 * D + SHIFT, *v = values.data() + 3 * D + SHIFT;
  const int from[ROWS] = {LENGTH / 7, LENGTH - 1};
  auto mask = std::make_unique<bool[]>(ROWS * LENGTH);
  for (int i = 0; i < ROWS * LENGTH; i++) mask[i] = i % LENGTH >= from[i / LENGTH];

  gridDim = {HEADS, ROWS};
  for (auto& team : teams) team = std::make_unique<std::barrier<>>(TEAM);
  const Strides single = {HEADS * D, D, D, 1}, cached = {SHARED * ROOM * D, ROOM * D, D, 1}, seen = {LENGTH, 9, 9, 1};
  for (int block = 0; block < ROWS * HEADS; block++) {
    whole = std::make_unique<std::barrier<>>(THREADS);
    std::vector<std::thread> threads;
    for (int i = 0; i < THREADS; i++)
      threads.emplace_back([&, i] {
        threadIdx = {i, 0};
        blockIdx = {block % HEADS, block / HEADS};
        attend(queries.data(), single, k, {ROWS, SHARED, LENGTH, D}, cached, v, cached, mask.get(),
               {ROWS, 1, 1, LENGTH}, seen, out.data());
      });
    for (auto& thread : threads) thread.join();
  }

  double worst = 0;
  for (int i = 0; i < ROWS * HEADS * D; i++) {
    const int head = i / D, row = head / HEADS, shared = row * SHARED + head % HEADS / GROUP;
    const auto at = shared * ROOM * D;
    worst = std::fmax(worst, std::fabs(out[i] - expected(&queries[head * D], k + at, v + at, from[row], i % D)));
  }
  std::printf("%g\n", worst);
}
