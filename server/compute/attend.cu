// Attention of one new token a row over a cache of which each row sees a part: the body of a kernel, whose head MLX
// writes. queries [B, H, 1, D], keys and values [B, H / GROUP, L, D] with any strides, mask [B or 1, H or 1, 1, L] of
// bool, out [B, H, 1, D]. One block for each query head of each row: LANES threads share a key, WIDTH dimensions each,
// and every such team keeps an online softmax of its own over every TEAMS-th key; at the end the teams' are put together.

constexpr int WIDTH = 16 / sizeof(T);
constexpr int LANES = D / WIDTH;
constexpr int TEAMS = THREADS / LANES;
constexpr float NONE = -1e30f;
constexpr float LOG2_E = 1.44269504f;
static_assert(LANES >= 1 && LANES <= 32 && (LANES & (LANES - 1)) == 0);

__shared__ float tops[TEAMS];
__shared__ float totals[TEAMS];
__shared__ float sums[TEAMS * D];

const int head = blockIdx.x;
const int row = blockIdx.y;
const int lane = threadIdx.x % LANES;
const int team = threadIdx.x / LANES;
const int length = keys_shape[2];
const auto lanes = cg::tiled_partition<LANES>(cg::this_thread_block());

const int64_t from = int64_t(lane) * WIDTH;
const T* query = queries + row * queries_strides[0] + head * queries_strides[1] + from * queries_strides[3];
const T* key = keys + row * keys_strides[0] + head / GROUP * keys_strides[1] + from * keys_strides[3];
const T* value = values + row * values_strides[0] + head / GROUP * values_strides[1] + from * values_strides[3];
const bool* seen = mask + (mask_shape[0] > 1 ? row * mask_strides[0] : 0) + (mask_shape[1] > 1 ? head * mask_strides[1] : 0);

// Sixteen bytes at once where they lie together and evenly.
auto is_even = [](const T* at, const Strides& strides) {
  return strides[3] == 1 && strides[2] * sizeof(T) % 16 == 0 && reinterpret_cast<uintptr_t>(at) % 16 == 0;
};
auto load = [](float* into, const T* at, int64_t stride, bool even) {
  if (even) {
    const uint4 both = *reinterpret_cast<const uint4*>(at);
    const T* each = reinterpret_cast<const T*>(&both);
    for (int i = 0; i < WIDTH; i++) into[i] = static_cast<float>(each[i]);
  } else {
    for (int i = 0; i < WIDTH; i++) into[i] = static_cast<float>(at[i * stride]);
  }
};
const bool even_keys = is_even(key, keys_strides);
const bool even_values = is_even(value, values_strides);

float mine[WIDTH], k[WIDTH], v[WIDTH], sum[WIDTH];
for (int i = 0; i < WIDTH; i++) {
  mine[i] = SCALE * LOG2_E * static_cast<float>(query[i * queries_strides[3]]);
  sum[i] = 0;
}
float top = NONE, total = 0;

for (int64_t at = team; at < length; at += TEAMS) {
  if (!seen[at * mask_strides[3]]) continue;  // the same for the whole team
  load(k, key + at * keys_strides[2], keys_strides[3], even_keys);
  load(v, value + at * values_strides[2], values_strides[3], even_values);
  float score = 0;
  for (int i = 0; i < WIDTH; i++) score += mine[i] * k[i];
  for (int other = LANES / 2; other > 0; other /= 2) score += lanes.shfl_xor(score, other);
  const float higher = fmaxf(top, score);
  const float before = exp2f(top - higher), weight = exp2f(score - higher);
  for (int i = 0; i < WIDTH; i++) sum[i] = sum[i] * before + weight * v[i];
  total = total * before + weight;
  top = higher;
}

if (lane == 0) {
  tops[team] = top;
  totals[team] = total;
}
for (int i = 0; i < WIDTH; i++) sums[team * D + from + i] = sum[i];
__syncthreads();

for (int d = threadIdx.x; d < D; d += THREADS) {
  float highest = NONE, all = 0, result = 0;
  for (int i = 0; i < TEAMS; i++) highest = fmaxf(highest, tops[i]);
  for (int i = 0; i < TEAMS; i++) {
    const float weight = exp2f(tops[i] - highest);
    all += totals[i] * weight;
    result += sums[i * D + d] * weight;
  }
  out[(int64_t(row) * gridDim.x + head) * D + d] = static_cast<T>(all > 0 ? result / all : 0);
}
