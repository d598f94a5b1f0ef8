// A learned model of the noise: relu(first . features of the state) through a head of M x M outputs, the logits of each move
// given each action. `arrivals` computes the log-probabilities of a batch's moves, `learn` the gradient of the cross-entropy.
//
// A warp takes a piece of a trajectory, a few steps; a lane has UNITS hidden units and their part of the head in registers. A
// move switches a feature on, and on a lattice another one off, so the first layer is a sum that changes by a row or two; and
// in the backward pass a feature's gradient is the sum of those of the states in which it is on. (Shared memory and shuffles
// are the limit, so little is left to them.)
//
// Defines (noise.py): H hidden units, APPEND, D, SIZE, STOP, M, T: the world, FEATURES inputs, WARPS per block, RESIDENT
// blocks per multiprocessor.

#define UNITS ((H + 31) / 32)
#define PAIRS (M * M)
#define WIDE (PAIRS | 1)  // row length of the head in shared memory: no bank conflicts
__device__ constexpr int power(int n) { return n <= 1 ? 1 : 2 * power((n + 1) / 2); }
// `gather` leaves sum i of n at lane i << lane_shift(n).
__device__ constexpr int lane_shift(int n) { return n >= 32 ? 0 : 1 + lane_shift(2 * n); }

// A piece of a trajectory: each lane holds a step of it, and columns of its first state.
struct Path {
    i64 at;
    u32 step;    // action, move, legal moves as bits, whether it trains
    int flag;    // the feature that the move switches on
    int length;  // decisions
    int columns[(D + 31) / 32];

    __device__ __forceinline__ void load(const i64* states, const i64* actions, const i64* moves, const signed char* alives, const signed char* reals,
                                         int s, int seeds, int batch, int most, int piece) {
        const int lane = threadIdx.x % 32, b = piece % batch, begin = piece / batch * most, t = begin + lane;
        const bool inside = lane < most && t < T;
        at = ((i64)t * seeds + s) * batch + b;
        step = flag = 0;
        const bool alive = inside && alives[at];
        const i64* first = states + (((i64)begin * seeds + s) * batch + b) * D;
#pragma unroll
        for (int c = 0; c < (D + 31) / 32; ++c) columns[c] = c * 32 + lane < D ? (int)first[c * 32 + lane] : SIZE;
        if (inside) {
            const int action = (int)actions[at], move = (int)moves[at];
            u32 legal = (1u << (APPEND ? SIZE : D)) - 1;
            flag = t * SIZE + move;
            if (!APPEND) {
                const i64* state = states + at * D;
#pragma unroll
                for (int d = 0; d < D; ++d) {
                    const int value = (int)state[d];
                    if (value >= SIZE - 1) legal &= ~(1u << d);
                    if (d == move) flag = d * SIZE + value + 1;
                }
            }
            const bool trains = (!reals || reals[s * batch + b]) && action >= 0 && action != STOP;
            step = (u32)(action & 7) | (u32)move << 3 | legal << 6 | (u32)trains << 14;
        }
        length = __popc(__ballot_sync(~0u, alive));
    }

    // A column of the first state.
    __device__ __forceinline__ int value(int d) const { return __shfl_sync(~0u, columns[d / 32], d % 32); }
};

// A step, unpacked.
struct Step {
    int action, move;
    u32 legal;
    bool trains;
    __device__ __forceinline__ Step(u32 word)
        : action((int)(word & 7)), move((int)(word >> 3 & 7)), legal(word >> 6 & 0xff), trains(word >> 14 & 1) {}
};

struct Model {
    const float* first;  // in shared memory
    float bias[UNITS], head[PAIRS][UNITS];
    int lane;

    __device__ __forceinline__ bool owns(int u) const { return H % 32 == 0 || u * 32 + lane < H; }

    __device__ __forceinline__ Model(float* memory, const float* weight, const float* first_bias, const float* head_weight, int s) {
        lane = threadIdx.x % 32;
        for (int i = threadIdx.x; i < FEATURES * H; i += WARPS * 32) memory[i] = weight[s * FEATURES * H + i];
        first = memory;
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            const int h = owns(u) ? u * 32 + lane : 0;
            bias[u] = first_bias[s * H + h];
#pragma unroll
            for (int p = 0; p < PAIRS; ++p) head[p][u] = owns(u) ? head_weight[(s * H + h) * PAIRS + p] : 0.f;
        }
        __syncthreads();
    }

    // The first layer at the first state of a piece, before its rectifier.
    __device__ __forceinline__ void begin(float* sum, const Path& path) const {
#pragma unroll
        for (int u = 0; u < UNITS; ++u) sum[u] = bias[u];
        for (int d = 0; d < D; ++d) {
            const int value = path.value(d);
            if (value >= SIZE) continue;  // padding
#pragma unroll
            for (int u = 0; u < UNITS; ++u)
                if (owns(u)) sum[u] += first[(d * SIZE + value) * H + u * 32 + lane];
        }
    }

    // What a move adds to it (sign 1), or subtracts when undone (-1).
    __device__ __forceinline__ void move(float* sum, int flag, float sign) const {
        const float* row = first + flag * H + lane;
#pragma unroll
        for (int u = 0; u < UNITS; ++u)
            if (owns(u)) sum[u] += sign * (APPEND ? row[u * 32] : row[u * 32] - row[u * 32 - H]);
    }
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT) arrivals(
    float* log_ks,  // [T, S, B, M] log P(the realised move | each action), where a decision was taken
    const float* first, const float* first_bias, const float* head, const float* head_bias, const i64* states, const i64* moves,
    const signed char* alives, int seeds, int batch, int most) {  // steps per piece
    extern __shared__ float memory[];
    const int s = blockIdx.y, warp = threadIdx.x / 32, pieces = (T + most - 1) / most * batch;
    const Model model(memory, first, first_bias, head, s);
    const int lane = model.lane, action = lane < M ? lane : 0;
    constexpr int SUMS = power(PAIRS);
    float bias[M];  // of this lane's action
#pragma unroll
    for (int m = 0; m < M; ++m) bias[m] = head_bias[s * PAIRS + action * M + m];
    for (int piece = blockIdx.x * WARPS + warp; piece < pieces; piece += gridDim.x * WARPS) {
        Path path;
        path.load(states, moves, moves, alives, nullptr, s, seeds, batch, most, piece);
        if (path.length == 0) continue;
        float x[UNITS];
        model.begin(x, path);
        for (int k = 0; k < path.length; ++k) {
            const Step step(__shfl_sync(~0u, path.step, k));
            float sum[SUMS];
#pragma unroll
            for (int i = 0; i < SUMS; ++i) {
                sum[i] = 0.f;
                if (i < PAIRS)
#pragma unroll
                    for (int u = 0; u < UNITS; ++u) sum[i] += fmaxf(x[u], 0.f) * model.head[i < PAIRS ? i : 0][u];
            }
            gather<SUMS, 16>(sum, lane);
            float logit[M], top = -3e38f, total = 0.f, chosen = 0.f;
#pragma unroll
            for (int m = 0; m < M; ++m) {
                logit[m] = __shfl_sync(~0u, sum[0], (action * M + m) << lane_shift(SUMS)) + bias[m];
                if (step.legal >> m & 1) top = fmaxf(top, logit[m]);
                if (m == step.move) chosen = logit[m];
            }
#pragma unroll
            for (int m = 0; m < M; ++m)
                if (step.legal >> m & 1) total += expf(logit[m] - top);
            const i64 at = __shfl_sync(~0u, path.at, k);
            if (lane < M) log_ks[at * M + lane] = chosen - top - logf(total);
            if (k + 1 < path.length) model.move(x, __shfl_sync(~0u, path.flag, k), 1.f);
        }
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT) learn(
    float* d_first, float* d_first_bias, float* d_head, float* d_head_bias, float* losses,  // added to: the gradients, [S] the loss
    const float* first, const float* first_bias, const float* head, const float* head_bias, const i64* states, const i64* actions,
    const i64* moves, const signed char* alives,
    const signed char* reals, const i64* counts,  // [S, B]; [S] steps that train, unless `every` one does
    int every, int seeds, int batch, int most) {
    extern __shared__ float memory[];
    __shared__ float biases[PAIRS];
    const int s = blockIdx.y, warp = threadIdx.x / 32, pieces = (T + most - 1) / most * batch;
    float* all = memory + FEATURES * H;  // [WARPS, FEATURES, H]: each warp adds to its own
    for (int i = threadIdx.x; i < WARPS * FEATURES * H; i += WARPS * 32) all[i] = 0.f;
    if (threadIdx.x < PAIRS) biases[threadIdx.x] = head_bias[s * PAIRS + threadIdx.x];
    const Model model(memory, first, first_bias, head, s);
    const int lane = model.lane;
    float* mine = all + warp * FEATURES * H + lane;
    const float share = 1.f / (every ? (float)T * batch : fmaxf((float)counts[s], 1.f));
    constexpr int SUMS = power(M);
    float loss = 0.f, d_bias[UNITS] = {}, d_pairs[PAIRS][UNITS] = {}, d_pair = 0.f;  // d_pair: bias of this lane's output
    for (int piece = blockIdx.x * WARPS + warp; piece < pieces; piece += gridDim.x * WARPS) {
        Path path;
        path.load(states, actions, moves, alives, every ? nullptr : reals, s, seeds, batch, most, piece);
        if (path.length == 0) continue;
        float x[UNITS], d_sum[UNITS] = {};  // of all later steps
        model.begin(x, path);
        for (int k = 0; k + 1 < path.length; ++k) model.move(x, __shfl_sync(~0u, path.flag, k), 1.f);
        for (int k = path.length - 1; k >= 0; --k) {
            if (k + 1 < path.length) {  // undo the move
                const int flag = __shfl_sync(~0u, path.flag, k);
                float* to = mine + flag * H;
#pragma unroll
                for (int u = 0; u < UNITS; ++u) {
                    if (!model.owns(u)) continue;
                    to[u * 32] += d_sum[u];
                    if (!APPEND) to[u * 32 - H] -= d_sum[u];
                }
                model.move(x, flag, -1.f);
            }
            const Step step(__shfl_sync(~0u, path.step, k));
            if (!step.trains) continue;
            float hidden[UNITS], sum[SUMS], logit[M], d_logit[M], d_hidden[UNITS] = {}, top = -3e38f, total = 0.f, chosen = 0.f;
#pragma unroll
            for (int u = 0; u < UNITS; ++u) hidden[u] = fmaxf(x[u], 0.f);
#pragma unroll
            for (int a = 0; a < M; ++a) {
                if (a != step.action) continue;
#pragma unroll
                for (int m = 0; m < SUMS; ++m) {
                    sum[m] = 0.f;
                    if (m < M)
#pragma unroll
                        for (int u = 0; u < UNITS; ++u) sum[m] += hidden[u] * model.head[m < M ? a * M + m : 0][u];
                }
            }
            gather<SUMS, 16>(sum, lane);
#pragma unroll
            for (int m = 0; m < M; ++m) {
                logit[m] = __shfl_sync(~0u, sum[0], m << lane_shift(SUMS));
                logit[m] = step.legal >> m & 1 ? logit[m] + biases[step.action * M + m] : -1e9f;
                top = fmaxf(top, logit[m]);
                if (m == step.move) chosen = logit[m];
            }
#pragma unroll
            for (int m = 0; m < M; ++m) total += d_logit[m] = expf(logit[m] - top);
            loss += top + logf(total) - chosen;
#pragma unroll
            for (int m = 0; m < M; ++m) {
                d_logit[m] = (d_logit[m] / total - (m == step.move ? 1.f : 0.f)) * share;
                if (lane == step.action * M + m) d_pair += d_logit[m];
            }
#pragma unroll
            for (int a = 0; a < M; ++a) {
                if (a != step.action) continue;
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int u = 0; u < UNITS; ++u) {
                        d_hidden[u] += d_logit[m] * model.head[a * M + m][u];
                        d_pairs[a * M + m][u] += d_logit[m] * hidden[u];
                    }
            }
#pragma unroll
            for (int u = 0; u < UNITS; ++u)
                if (x[u] > 0.f) d_sum[u] += d_hidden[u];
        }
#pragma unroll
        for (int u = 0; u < UNITS; ++u) d_bias[u] += d_sum[u];
        for (int d = 0; d < D; ++d) {  // the features of the first state
            const int value = path.value(d);
            if (value >= SIZE) continue;
#pragma unroll
            for (int u = 0; u < UNITS; ++u)
                if (model.owns(u)) mine[(d * SIZE + value) * H + u * 32] += d_sum[u];
        }
    }

    // sums of all warps, then of all blocks
#pragma unroll
    for (int u = 0; u < UNITS; ++u)
        if (model.owns(u)) atomicAdd(d_first_bias + s * H + u * 32 + lane, d_bias[u]);
    if (lane < PAIRS) atomicAdd(d_head_bias + s * PAIRS + lane, d_pair);
    if (lane == 0) atomicAdd(losses + s, loss * share);
    __syncthreads();
    for (int i = threadIdx.x; i < FEATURES * H; i += WARPS * 32) {
        float total = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) total += all[w * FEATURES * H + i];
        atomicAdd(d_first + s * FEATURES * H + i, total);
    }
    __syncthreads();
    // the head's sums are in registers: warps take turns in shared memory that is free by now
    for (int w = 0; w < WARPS; ++w) {
        if (w == warp)
#pragma unroll
            for (int p = 0; p < PAIRS; ++p)
#pragma unroll
                for (int u = 0; u < UNITS; ++u) {
                    float* to = memory + (u * 32 + lane) * WIDE + p;
                    if (model.owns(u)) *to = (w ? *to : 0.f) + d_pairs[p][u];
                }
        __syncthreads();
    }
    for (int i = threadIdx.x; i < H * PAIRS; i += WARPS * 32) atomicAdd(d_head + s * H * PAIRS + i, memory[i / PAIRS * WIDE + i % PAIRS]);
}
