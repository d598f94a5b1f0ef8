// A whole rollout in one kernel. A block walks ROWS trajectories of one seed from the first state to the last of them that ends.
//
// The second layer stays on the multiprocessor: each of the THREADS threads owns SPAN weights of one hidden unit, as many as it can in
// registers, the rest in shared memory. A move changes one or two one-hot features, so the first layer is a row added and a row taken away.
// One warp a trajectory draws the action, slips, and takes the step.
//
// Defined by the host (rollout_kernel.py): H hidden units, T steps at most, STEPS states to look at, TRACE, STRING (else a grid), D columns
// of a state, SIZE of the alphabet or the grid's side, LEAST letters before STOP (-1: none), M moves, OUT outputs of which COLUMNS are
// kept, W width of a look-up table (0: none), EXPLORES, SLIPS, ROWS, THREADS, FEATURES, REST_SHARED and FIRST_SHARED (what there is room for), IN_REGISTERS weights a thread;
// EARLY steps meet only EARLY_STATES states, whose outputs are given, EARLY_WIDTH numbers each: there the network is not asked.
//
// With TRACE, what the network makes of every state that is reached stays in sums (the first layer before its rectifier), hiddens (the
// second after it) and outs. Rows come in the order of steps, after those of the early states, whose numbers are noted instead; `knowns`
// says which were reached.

#define WARPS (THREADS / 32)
#define PARTS (THREADS / H)  // threads that share a hidden unit
#define SPAN (H / PARTS)
#define REGISTERS (SPAN < IN_REGISTERS ? SPAN : IN_REGISTERS)
#define NETWORK (EARLY < STEPS)
#define REST (NETWORK ? SPAN - REGISTERS : 0)  // weights a thread that are not in registers
#define REST_STRIDE (REST_SHARED ? THREADS : H)
#define SMALL_HEAD (OUT <= 32)
#define HEAD_SHARED (SMALL_HEAD && NETWORK)
#define ROW(t, b) ((i64)s * kept + EARLY_STATES + (i64)((t) - EARLY) * batch + (b))  // of a trace
#define HEAD_PARTS (THREADS / COLUMNS)
#define HEAD_SPAN (H / HEAD_PARTS)

typedef long long i64;
typedef unsigned int u32;

// Four random words of a place (Philox 4x32, ten rounds).
__device__ __forceinline__ uint4 words(u32 a, u32 b, u32 c, u32 key) {
    uint4 x = make_uint4(a, b, c, 0);
    u32 k0 = key, k1 = 0x5f3759df;
#pragma unroll
    for (int i = 0; i < 10; ++i) {
        u32 high0 = __umulhi(0xD2511F53u, x.x), low0 = 0xD2511F53u * x.x;
        u32 high1 = __umulhi(0xCD9E8D57u, x.z), low1 = 0xCD9E8D57u * x.z;
        x = make_uint4(high1 ^ x.y ^ k0, low1, high0 ^ x.w ^ k1, low0);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return x;
}

// Sixteen bytes to shared memory, without waiting for them.
__device__ __forceinline__ void ahead(float* to, const float* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from));
}

__device__ __forceinline__ float uniform(u32 word) { return (word >> 9) * 0x1p-23f + 0x1p-24f; }  // inside (0, 1)

// The place of the largest of a warp's candidates, to all its lanes; among equals the lowest lane's.
__device__ __forceinline__ int largest(float value, int place) {
    const int bits = __float_as_int(value);
    const u32 ordered = bits < 0 ? ~bits : bits | 0x80000000u;
    const u32 most = __reduce_max_sync(~0u, ordered);
    return __shfl_sync(~0u, place, __ffs(__ballot_sync(~0u, ordered == most)) - 1);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) walk(
    i64* states, i64* actions, i64* moves, signed char* alives,       // [T+1, S, B, D], [T, S, B]
    signed char* knowns, float* sums, float* hiddens, float* outs,    // with TRACE: [S, kept], [..., H] twice, [..., COLUMNS]
    int* numbers, i64* finals,                                        // with TRACE: [EARLY, S, B]; always: [S, B] of the last states
    const float* first, const float* first_bias, const float* second, const float* second_bias, const float* head,
    const float* head_bias, const float* table, const float* early,   // [S, ...] each; early [S, early_rows, EARLY_WIDTH]
    const i64* seed, const double* step, double start, double tau, double alpha,  // explores by start / (1 + step / tau); tau 0: by `step`
    int seeds, int batch, int table_rows, int early_rows, int kept) {
    extern __shared__ float memory[];
    float* rest = memory;                                        // [REST, THREADS] of the second layer
    float* heads = rest + (REST_SHARED ? REST * THREADS : 0);    // [OUT, H + W]
    float* firsts = heads + (HEAD_SHARED ? OUT * (H + W) : 0);    // [FEATURES, H]
    float* x = firsts + (FIRST_SHARED ? FEATURES * H : 0);       // [ROWS, H] the first layer
    float* hidden = x + ROWS * H;                                // [ROWS, H + W] the second, and the table's row
    float* part = hidden + ROWS * (H + W);                       // [ROWS, THREADS]
    float* logit = part + ROWS * THREADS;                        // [ROWS, COLUMNS]
    int* state = (int*)(logit + ROWS * COLUMNS);                 // [ROWS, D]
    int* feature = state + ROWS * D;                             // [ROWS] what the last move switched on; -1: it changed nothing
    int* entry = feature + ROWS;                                 // [ROWS] of the table

    const int s = blockIdx.y, tid = threadIdx.x, warp = tid / 32, lane = tid % 32, unit = tid % H, share = tid / H;
    const int from = blockIdx.x * ROWS;
    first += (i64)s * FEATURES * H;
    second += (i64)s * H * H;
    head += (i64)s * (H + W) * OUT;
    table += (i64)s * table_rows * W;

    for (int i = tid; REST_SHARED && i < REST * THREADS / 4; i += THREADS) {  // four units at a time
        const int t4 = i % (THREADS / 4) * 4;
        ahead(rest + i * 4, second + (t4 / H * SPAN + REGISTERS + i / (THREADS / 4)) * H + t4 % H);
    }
    if (HEAD_SHARED)
        for (int i = tid; i < OUT * (H + W); i += THREADS) heads[i % OUT * (H + W) + i / OUT] = head[i];
    if (FIRST_SHARED)
        for (int i = tid; i < FEATURES * H / 4; i += THREADS) ahead(firsts + i * 4, first + i * 4);
    float weight[REGISTERS];
#pragma unroll
    for (int i = 0; i < REGISTERS; ++i) weight[i] = !NETWORK ? 0.f : second[(share * SPAN + i) * H + unit];
    asm volatile("cp.async.wait_all;");
    const float* rows = FIRST_SHARED ? firsts : first;
    const float bias = second_bias[s * H + unit];
    float total[ROWS];  // of the first layer before its rectifier
    if (NETWORK && tid < H) {
        float begun = first_bias[s * H + tid];
        if (!STRING)
            for (int d = 0; d < D; ++d) begun += first[(i64)d * SIZE * H + tid];
        for (int r = 0; r < ROWS; ++r) {
            total[r] = begun;
            x[r * H + tid] = fmaxf(begun, 0.f);
            if (TRACE && !EARLY && from + r < batch) sums[ROW(0, from + r) * H + tid] = begun;
        }
    }
    for (int i = tid; i < ROWS * W; i += THREADS) hidden[i / (W + !W) * (H + W) + H + i % (W + !W)] = table[i % (W + !W)];
    // of the trajectory that this warp walks, if any
    const int b = from + warp;
    const bool walks = warp < ROWS && b < batch;
    const u32 key = (u32)*seed;
    const float chance = !EXPLORES ? 0.f : tau > 0 ? (float)(start * tau / (tau + *step)) : (float)*step;
    int length = 0;
    i64 number = 0;
    bool stopped = false, fresh = walks;
    if (walks)
        for (int d = lane; d < D; d += 32) {
            state[warp * D + d] = STRING ? SIZE : 0;
            states[((i64)s * batch + b) * D + d] = STRING ? SIZE : 0;
        }
    __syncthreads();

    int t = 0;
    for (bool going = true; going && t < STEPS; ++t) {
        if (t >= EARLY) {
            // the second layer
            float sum[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) sum[r] = 0.f;
#pragma unroll
            for (int i = 0; i < REGISTERS; i += 4)
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
                    float4 v = *(const float4*)(x + r * H + share * SPAN + i);
                    sum[r] += v.x * weight[i] + v.y * weight[i + 1] + v.z * weight[i + 2] + v.w * weight[i + 3];
                }
#pragma unroll
            for (int i = 0; i < REST; i += 4) {
                const float* w = (REST_SHARED ? rest + tid : second + (share * SPAN + REGISTERS) * H + unit) + i * REST_STRIDE;
                float w0 = w[0], w1 = w[REST_STRIDE], w2 = w[2 * REST_STRIDE], w3 = w[3 * REST_STRIDE];
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
                    float4 v = *(const float4*)(x + r * H + share * SPAN + REGISTERS + i);
                    sum[r] += v.x * w0 + v.y * w1 + v.z * w2 + v.w * w3;
                }
            }
#pragma unroll
            for (int r = 0; r < ROWS; ++r) part[r * THREADS + tid] = sum[r];
            __syncthreads();
            for (int i = tid; i < ROWS * H; i += THREADS) {
                const int r = i / H, h = i % H;  // h is this thread's unit
                float made = bias;
#pragma unroll
                for (int p = 0; p < PARTS; ++p) made += part[r * THREADS + p * H + h];
                made = fmaxf(made, 0.f);
                hidden[r * (H + W) + h] = made;
                if (TRACE && from + r < batch) hiddens[ROW(t, from + r) * H + h] = made;
            }
            __syncthreads();

            // the head
            if (SMALL_HEAD) {
                for (int i = warp; i < ROWS * OUT; i += WARPS) {
                    const int r = i / OUT, o = i % OUT;
                    float made = 0.f;
#pragma unroll
                    for (int h = 0; h < H + W; h += 32)
                        if (h + lane < H + W) made += hidden[r * (H + W) + h + lane] * heads[o * (H + W) + h + lane];
#pragma unroll
                    for (int offset = 16; offset > 0; offset /= 2) made += __shfl_xor_sync(~0u, made, offset);
                    if (lane == 0) logit[r * COLUMNS + o] = made + head_bias[s * OUT + o];
                }
            } else {
                const int o = tid % COLUMNS, begin = tid / COLUMNS * HEAD_SPAN;
                float made[ROWS];
#pragma unroll
                for (int r = 0; r < ROWS; ++r) made[r] = 0.f;
                if (o < M)
#pragma unroll 32
                    for (int h = begin; h < begin + HEAD_SPAN; ++h) {
                        const float w = __ldg(head + h * OUT + o);
#pragma unroll
                        for (int r = 0; r < ROWS; ++r) made[r] += hidden[r * (H + W) + h] * w;
                    }
#pragma unroll
                for (int r = 0; r < ROWS; ++r) part[r * THREADS + tid] = made[r];
                __syncthreads();
                for (int i = tid; i < ROWS * COLUMNS; i += THREADS) {
                    const int r = i / COLUMNS, column = i % COLUMNS;
                    float whole = column < M ? head_bias[s * OUT + column] : 0.f;
                    for (int p = 0; p < HEAD_PARTS; ++p) whole += part[r * THREADS + p * COLUMNS + column];
                    logit[i] = whole;
                }
            }
            __syncthreads();
        }

        bool goes = false;
        if (walks) {
            const i64 at = ((i64)t * seeds + s) * batch + b;
            if (TRACE && t < EARLY) {
                if (lane == 0) numbers[at] = (int)number;
            } else if (TRACE) {
                for (int o = lane; o < COLUMNS; o += 32)
                    outs[ROW(t, b) * COLUMNS + o] = o < (SMALL_HEAD ? OUT : M) ? logit[warp * COLUMNS + o] : 0.f;
                if (lane == 0) knowns[ROW(t, b)] = fresh;
            }
            if (t < T) {
                // the action, and what the world makes of it
                const u32 row = s * batch + b;
                const uint4 coins = words(row, t, ~0u, key);
                const bool blind = EXPLORES && uniform(coins.x) < chance;
                float best = -3e38f, drawn = -3e38f;
                int action = 0, other = 0;
                bool any = false;
                const float* given = t < EARLY ? early + ((i64)s * early_rows + number) * EARLY_WIDTH : logit + warp * COLUMNS;
                for (int m = lane; m < M; m += 32) {
                    const bool legal = STRING ? m < SIZE && length < D : m < D && state[warp * D + m] < SIZE - 1;
                    const bool open = legal || (m == STOP && (!STRING || length >= LEAST));
                    const uint4 noise = words(row, t, m, key);
                    float z = given[m];
                    z = blind || z != z ? 0.f : z;  // a seed of NaN stays in range
                    z = open ? fmaxf(z, -1e8f) - logf(-logf(uniform(noise.x))) : -1e9f;
                    if (z > best) best = z, action = m;
                    const float u = legal ? uniform(noise.y) : -1.f;
                    if (u > drawn) drawn = u, other = m;
                    any |= legal;
                }
                action = largest(best, action);
                int move = action;
                if (SLIPS) {
                    other = largest(drawn, other);
                    if (uniform(coins.y) < alpha && action != STOP) move = other;
                }
                const bool alive = __any_sync(~0u, any) && !stopped;
                stopped |= action == STOP;
                goes = alive && move != STOP;
                if (lane == 0) {
                    actions[at] = action;
                    moves[at] = move;
                    alives[at] = alive;
                    feature[warp] = !goes ? -1 : STRING ? length * SIZE + move : move * SIZE + state[warp * D + move] + 1;
                    if (goes) {
                        if (STRING)
                            state[warp * D + length] = move;
                        else
                            state[warp * D + move] += 1;
                    }
                }
                if (goes) {  // the number of the next state, in the environment's order
                    length += 1;
                    i64 place = 1;
                    for (int d = STRING ? D : move + 1; d < D; ++d) place *= SIZE;
                    number = STRING ? number * SIZE + 1 + move : number + place;
                    if (W && lane == 0) entry[warp] = (int)(number < table_rows ? number : table_rows - 1);
                }
                __syncwarp();
                for (int d = lane; d < D; d += 32) states[(at + (i64)seeds * batch) * D + d] = state[warp * D + d];
                fresh = goes;
            }
        } else if (warp < ROWS && lane == 0) {
            feature[warp] = -1;
        }
        going = __syncthreads_or(goes);

        // the features that it changes
        if (NETWORK && going && t + 1 < STEPS) {
            for (int r = 0; r < ROWS; ++r) {
                const int f = feature[r];
                if (tid < H && f >= 0) {
                    total[r] += rows[(i64)f * H + tid] - (STRING ? 0.f : rows[(i64)(f - 1) * H + tid]);
                    x[r * H + tid] = fmaxf(total[r], 0.f);
                }
                if (TRACE && t + 1 >= EARLY && tid < H && from + r < batch) sums[ROW(t + 1, from + r) * H + tid] = total[r];
                if (W && f >= 0)
                    for (int i = tid; i < W; i += THREADS) hidden[r * (H + W) + H + i] = table[(i64)entry[r] * W + i];
            }
        }
        __syncthreads();
    }

    if (walks && lane == 0) finals[(i64)s * batch + b] = number;
    if (walks)  // all have finished: nothing more happens
        for (; t < STEPS; ++t) {
            const i64 at = ((i64)t * seeds + s) * batch + b;
            if (TRACE && lane == 0 && t < EARLY) numbers[at] = (int)number;
            if (TRACE && lane == 0 && t >= EARLY) knowns[ROW(t, b)] = 0;
            if (t < T) {
                if (lane == 0) {
                    actions[at] = moves[at] = STOP < 0 ? 0 : STOP;
                    alives[at] = 0;
                }
                for (int d = lane; d < D; d += 32) states[(at + (i64)seeds * batch) * D + d] = state[warp * D + d];
            }
        }
}
