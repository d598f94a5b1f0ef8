// A whole rollout in one kernel. A block of threads takes ROWS trajectories of one seed from the first state until the last
// of them ends, then others.
//
// The second layer stays on the multiprocessor: each of the THREADS threads owns the weights between UNITS hidden units and
// SPAN inputs, as many as fit in registers, the rest in shared memory; neighbours in a warp, which own the other inputs, add
// up by shuffles. (The limit is how fast shared memory fills registers, so an input that was read serves UNITS units, a
// weight CHUNK trajectories.) A move changes one or two one-hot features, so the first layer is a row added and a row
// subtracted. One warp per trajectory draws the action and the slip, and takes the step.
//
// Where the trajectories share few states in the first EARLY steps, these steps are a launch of their own, without NETWORK:
// it looks outputs up, EARLY_WIDTH numbers for each of EARLY_STATES states. The next launch continues at step BEGIN (only
// in worlds that append).
//
// Random numbers: Philox, keyed by (key, step), with seed and trajectory, step of the trajectory and move as its counter.
//
// Defines (walk.py):
//   H hidden units, FEATURES inputs, OUT outputs of the head, COLUMNS of them kept (padded), W width of a look-up table (0: none)
//   APPEND, D, SIZE, LEAST, STOP, M, T: the world; SLIPS: actions may be replaced
//   BEGIN, END: states to look at; NETWORK; HANDS_ON: another launch follows; TRACE: keep activations
//   EARLY, EARLY_STATES, EARLY_WIDTH: of the shared states
//   THREADS, ROWS, UNITS; HELD: groups of four inputs whose weights are in registers; RESIDENT: blocks per multiprocessor
//   SMALL_HEAD: the head's weights are in shared memory; else HEAD_KEPT inputs per thread are
//   REST_SHARED, FIRST_SHARED: whether the rest of the second layer, and the first, fit in shared memory
//
// With TRACE, the activations of every state that is reached stay in sums (first layer before its rectifier), hiddens
// (second layer after it) and outs (head). Rows are in the order of steps, after those of the early states, for which the
// state's number is kept instead.

#define WARPS (THREADS / 32)
#define SHARES (THREADS * UNITS / H)  // threads that share their units
#define SPAN (H / SHARES)
#define FOURS (SPAN / 4)  // a thread's inputs are four in a row, then four of the next SHARES * 4, and so on
#define REST (NETWORK && FOURS > HELD ? FOURS - HELD : 0)  // fours whose weights are not in registers
#define CHUNK (ROWS < 4 ? ROWS : 4)  // trajectories at once
#define LEFT (CHUNK * UNITS > SHARES ? CHUNK * UNITS / SHARES : 1)  // sums that a thread ends up with
#define TENSOR (ROWS == 8 && UNITS == 4 && SHARES == 4)  // by tensor cores: a warp's units by eight trajectories
#define WIDE (H + (TENSOR ? 16 : 0))  // row length of the first layer: no bank conflicts
#define OWNERS (THREADS / H)  // threads that own a unit of the first layer, each for some of the trajectories
#define OWNED ((ROWS + OWNERS - 1) / OWNERS)
#define ROW(t, b) ((i64)s * kept + EARLY_STATES + (i64)((t) - EARLY) * batch + (b))  // of a trace
// Of a large head a thread owns four neighbouring outputs, and shares them with other threads.
#define HEAD_SHARES (4 * THREADS / COLUMNS < H / 4 ? 4 * THREADS / COLUMNS : H / 4)
#define HEAD_SPAN (H / HEAD_SHARES)

// Four random words at a counter (Philox 4x32, ten rounds).
__device__ __forceinline__ uint4 philox(u32 a, u32 b, u32 c, uint2 key) {
    uint4 x = make_uint4(a, b, c, 0);
    u32 k0 = key.x, k1 = key.y;
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

__device__ __forceinline__ float uniform(u32 word) { return (word >> 9) * 0x1p-23f + 0x1p-24f; }  // inside (0, 1)

// Where the largest of a warp's candidates is, for all its lanes; among equals the lowest lane's.
__device__ __forceinline__ int argmax(float value, int place) {
    const int bits = __float_as_int(value);
    const u32 ordered = bits < 0 ? ~bits : bits | 0x80000000u;
    const u32 most = __reduce_max_sync(~0u, ordered);
    return __shfl_sync(~0u, place, __ffs(__ballot_sync(~0u, ordered == most)) - 1);
}

struct alignas(4 * UNITS) Units {
    float of[UNITS];
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) walk(
    i64* states, i64* actions, i64* moves, signed char* alives,  // [T+1, S, B, D], [T, S, B] three times
    float* sums, float* hiddens, float* outs,  // with TRACE: [S, kept, H] twice, [S, kept, COLUMNS]
    int* numbers, int* entries,  // with TRACE: [EARLY, S, B] numbers of early states; [S, kept] rows of the table of late ones
    i64* final_numbers,  // [S, B] numbers of the last states (handed on: ~number of those that have stopped)
    const float* first, const float* first_bias, const float* second, const float* second_bias, const float* head,
    const float* head_bias, const float* table, const float* early,  // [S, ...] each; early [S, early_rows, EARLY_WIDTH]
    const i64* key_word, const double* step,  // of the random numbers
    const double* explore, double start, double tau, double alpha,  // explores by start / (1 + explore / tau); tau 0: by `explore`
    int seeds, int batch, int table_rows, int early_rows, int kept) {
    extern __shared__ float memory[];
    Units* rest = (Units*)memory;                                               // [REST * 4, THREADS] of the second layer
    float* heads = memory + (REST_SHARED ? REST * 4 * THREADS * UNITS : 0);     // [OUT, H + W]; a large head: [HEAD_KEPT, THREADS, 4]
    float* firsts = heads + (!NETWORK ? 0 : SMALL_HEAD ? OUT * (H + W) : HEAD_KEPT * 4 * THREADS);  // [FEATURES, H]
    float* x = firsts + (FIRST_SHARED ? FEATURES * H : 0);                      // [ROWS, WIDE] the first layer
    float* hidden = x + ROWS * WIDE;                                            // [ROWS, H + W] the second, and the table's row
    float* part = hidden + ROWS * (H + W);                                      // [ROWS, HEAD_SHARES, COLUMNS] of a large head
    float* logit = part + (SMALL_HEAD ? 0 : ROWS * HEAD_SHARES * COLUMNS);      // [ROWS, COLUMNS]
    float* biases = logit + ROWS * COLUMNS;                                     // [COLUMNS] of the head
    float* noise = biases + COLUMNS;                                            // [2, ROWS, COLUMNS] of this step and the next
    float* slip_noise = noise + 2 * ROWS * COLUMNS;                             // [2, ROWS, COLUMNS] with SLIPS
    float* coins = slip_noise + (SLIPS ? 2 * ROWS * COLUMNS : 0);               // [2, ROWS, 2]
    int* state = (int*)(coins + 4 * ROWS);                                      // [ROWS, D]
    int* feature = state + ROWS * D;                                            // [ROWS] switched on by the last move; -1: ended
    int* entry = feature + ROWS;                                                // [ROWS] of the table

    const int s = blockIdx.y, tid = threadIdx.x, warp = tid / 32, lane = tid % 32, share = tid % SHARES;
    const int unit = tid / SHARES * UNITS;     // the first one of this thread
    const int own = tid % H, owner = tid / H;  // in the first layer
    const int column = tid % (COLUMNS / 4) * 4, head_share = tid / (COLUMNS / 4);  // in a large head
    first += (i64)s * FEATURES * H;
    second += (i64)s * H * H + unit;
    head += (i64)s * (H + W) * (SMALL_HEAD ? OUT : COLUMNS);
    const float* mine = head + head_share * HEAD_SPAN * COLUMNS + column;  // part of a large head
    table += (i64)s * table_rows * W;

    // load the weights once
#define INPUT(four, i) (((four)*SHARES + share) * 4 + (i))
#define WEIGHT(four, i)                                                                                    \
    (four < FOURS - REST ? weight[four < FOURS - REST ? four * 4 + i : 0]                                  \
     : REST_SHARED       ? rest[((four - HELD) * 4 + i) * THREADS + tid]                                   \
                         : *(const Units*)(second + INPUT(four, i) * H))
    if (REST_SHARED)
#pragma unroll
        for (int i = 0; i < REST * 4; ++i) copy_async<16>((float*)(rest + i * THREADS + tid), second + INPUT(HELD + i / 4, i % 4) * H, true);
    if (FIRST_SHARED)
        for (int i = tid; i < FEATURES * H / 4; i += THREADS) copy_async<16>(firsts + i * 4, first + i * 4, true);
    if (!SMALL_HEAD && head_share < HEAD_SHARES)
        for (int i = 0; i < HEAD_KEPT; ++i) copy_async<16>(heads + (i * THREADS + tid) * 4, mine + i * COLUMNS, true);
    Units weight[NETWORK && FOURS > REST ? (FOURS - REST) * 4 : 1];
#pragma unroll
    for (int i = 0; NETWORK && i < (FOURS - REST) * 4; ++i) weight[i] = *(const Units*)(second + INPUT(i / 4, i % 4) * H);
    if (SMALL_HEAD && NETWORK)
        for (int i = tid; i < OUT * (H + W); i += THREADS) heads[i % OUT * (H + W) + i / OUT] = head[i];
    for (int o = tid; o < COLUMNS; o += THREADS) biases[o] = o < (SMALL_HEAD ? OUT : M) ? head_bias[s * OUT + o] : 0.f;
    const int place = gathered<CHUNK * UNITS, SHARES / 2>(lane);
    float bias[TENSOR ? UNITS : LEFT];
#pragma unroll
    for (int i = 0; i < (TENSOR ? UNITS : LEFT); ++i) bias[i] = second_bias[s * H + unit + (TENSOR ? i : (place + i) % UNITS)];
    float begun = 0.f;  // first layer at the first state
    if (NETWORK) {
        begun = first_bias[s * H + own];
        if (!APPEND)
            for (int d = 0; d < D; ++d) begun += first[(i64)d * SIZE * H + own];
    }
    const float* rows = FIRST_SHARED ? firsts : first;
    const uint2 key = {(u32)*key_word, 0x5f3759dfu ^ (u32)*step};
    const float chance = tau > 0 ? (float)(start * tau / (tau + *explore)) : (float)*explore;
    asm volatile("cp.async.wait_all;");

    auto wait = [] {  // without a network, warps are independent
        if (NETWORK)
            __syncthreads();
        else
            __syncwarp();
    };
    for (int from = blockIdx.x * ROWS; from < batch; from += gridDim.x * ROWS) {
        // the trajectory of this warp, if any
        const int b = from + warp;
        const bool walks = warp < ROWS && b < batch;
        int length = BEGIN;
        i64 number = !BEGIN || !walks ? 0 : final_numbers[(i64)s * batch + b];
        bool stopped = number < 0;
        if (stopped) number = ~number;
        if (warp < ROWS && lane == 0) {
            feature[warp] = walks && !stopped ? 0 : -1;
            entry[warp] = (int)(number < table_rows ? number : table_rows - 1);
        }
        if (walks)
            for (int d = lane; d < D; d += 32) {
                i64* here = states + (((i64)BEGIN * seeds + s) * batch + b) * D + d;
                if (!BEGIN) *here = APPEND ? SIZE : 0;
                state[warp * D + d] = (int)*here;
            }
        wait();
        float total[OWNED];  // first layer before its rectifier: trajectories owner, owner + OWNERS, ...
#pragma unroll
        for (int i = 0; i < OWNED; ++i) {
            const int r = i * OWNERS + owner;
            total[i] = begun;
            if (!NETWORK || r >= ROWS || feature[r] < 0) continue;
#pragma unroll
            for (int d = 0; d < BEGIN; ++d) total[i] += rows[(i64)(d * SIZE + state[r * D + d]) * H + own];
            x[r * WIDE + own] = fmaxf(total[i], 0.f);
            if (TRACE) sums[ROW(BEGIN, from + r) * H + own] = total[i];
        }
        for (int i = tid; NETWORK && i < ROWS * W; i += THREADS) {
            const int r = i / (W + !W), at = i % (W + !W);
            if (feature[r] >= 0) hidden[r * (H + W) + H + at] = table[(i64)entry[r] * W + at];
        }
        // Random numbers of step t do not depend on the network: idle warps, if any, draw them while the others take step t - 1.
        auto draw = [&](int t, int r, int m) {
            const u32 at = s * batch + from + r;
            const int to = (t % 2 * ROWS + r) * COLUMNS + m;
            const uint4 drawn = philox(at, t, m, key);
            noise[to] = -logf(-logf(uniform(drawn.x)));
            if (SLIPS) slip_noise[to] = uniform(drawn.y);
            if (m == 0) {
                const uint4 thrown = philox(at, t, ~0u, key);
                coins[(t % 2 * ROWS + r) * 2] = uniform(thrown.x);
                coins[(t % 2 * ROWS + r) * 2 + 1] = uniform(thrown.y);
            }
        };
        auto prepare = [&](int t) {
            if (ROWS == WARPS)
                for (int m = lane; m < M; m += 32) draw(t, warp, m);
            else
                for (int i = tid - 32 * ROWS; i >= 0 && i < ROWS * COLUMNS; i += THREADS - 32 * ROWS)
                    if (i % COLUMNS < M) draw(t, i / COLUMNS, i % COLUMNS);
        };
        prepare(BEGIN);
        wait();

        int t = BEGIN;
        for (bool going = true; going && t < END; ++t) {
            if (NETWORK) {
                // the second layer
                if constexpr (TENSOR) {
                    const int row = lane / 4;
                    float whole[2][4] = {}, fine[2][2][4] = {};  // apart: chains of dependent products are slow
#pragma unroll
                    for (int four = 0; four < FOURS; ++four) {
                        const float4 v = *(const float4*)(x + row * WIDE + INPUT(four, 0));
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            const Units w[2] = {WEIGHT(four, half * 2), WEIGHT(four, half * 2 + 1)};
                            u32 b_lead[2], b_trail[2];
                            split(half ? v.z : v.x, b_lead[0], b_trail[0]);
                            split(half ? v.w : v.y, b_lead[1], b_trail[1]);
#pragma unroll
                            for (int pair = 0; pair < 2; ++pair) {  // this thread's units
                                u32 a_lead[4], a_trail[4];
#pragma unroll
                                for (int e = 0; e < 4; ++e) split(w[e / 2].of[pair * 2 + e % 2], a_lead[e], a_trail[e]);
                                multiply(fine[half][pair], a_trail, b_lead);
                                multiply(whole[pair], a_lead, b_lead);
                                multiply(fine[half][pair], a_lead, b_trail);
                            }
                        }
                    }
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int r = lane % 4 * 2 + e;
                        float made[4];
#pragma unroll
                        for (int u = 0; u < 4; ++u) {
                            const int at = u % 2 * 2 + e;
                            made[u] = fmaxf(whole[u / 2][at] + (fine[0][u / 2][at] + fine[1][u / 2][at]) + bias[u], 0.f);
                        }
                        const float4 all = make_float4(made[0], made[1], made[2], made[3]);
                        *(float4*)(hidden + r * (H + W) + unit) = all;
                        if (TRACE && feature[r] >= 0) *(float4*)(hiddens + ROW(t, from + r) * H + unit) = all;
                    }
                } else
#pragma unroll 1
                for (int c = 0; c < ROWS; c += CHUNK) {
                    bool on = false;
#pragma unroll
                    for (int r = 0; r < CHUNK; ++r) on |= feature[c + r] >= 0;
                    if (!on) continue;
                    float sum[CHUNK * UNITS];
#pragma unroll
                    for (int i = 0; i < CHUNK * UNITS; ++i) sum[i] = 0.f;
#pragma unroll
                    for (int four = 0; four < FOURS; ++four) {
                        float4 v[CHUNK];
#pragma unroll
                        for (int r = 0; r < CHUNK; ++r) v[r] = *(const float4*)(x + (c + r) * WIDE + INPUT(four, 0));
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            const Units w = WEIGHT(four, i);
#pragma unroll
                            for (int r = 0; r < CHUNK; ++r)
#pragma unroll
                                for (int u = 0; u < UNITS; ++u)
                                    sum[r * UNITS + u] += (i == 0 ? v[r].x : i == 1 ? v[r].y : i == 2 ? v[r].z : v[r].w) * w.of[u];
                        }
                    }
                    gather<CHUNK * UNITS, SHARES / 2>(sum, lane);
#pragma unroll
                    for (int i = 0; i < LEFT; ++i) {
                        const int r = c + (place + i) / UNITS, h = unit + (place + i) % UNITS;
                        const float made = fmaxf(sum[i] + bias[i], 0.f);
                        hidden[r * (H + W) + h] = made;
                        if (TRACE && from + r < batch) hiddens[ROW(t, from + r) * H + h] = made;
                    }
                }
                __syncthreads();

                // the head
                if (SMALL_HEAD) {
                    for (int i = warp; i < ROWS * OUT; i += WARPS) {
                        const int r = i / OUT, o = i % OUT;
                        if (feature[r] < 0) continue;
                        float made = 0.f;
#pragma unroll
                        for (int h = 0; h < H + W; h += 32)
                            if (h + lane < H + W) made += hidden[r * (H + W) + h + lane] * heads[o * (H + W) + h + lane];
#pragma unroll
                        for (int offset = 16; offset > 0; offset /= 2) made += __shfl_xor_sync(~0u, made, offset);
                        if (lane == 0) logit[r * COLUMNS + o] = made + biases[o];
                    }
                } else {
                    float4 made[ROWS];
#pragma unroll
                    for (int r = 0; r < ROWS; ++r) made[r] = make_float4(0.f, 0.f, 0.f, 0.f);
                    auto four = [&](int h, bool here) {
                        float4 w[4];
#pragma unroll
                        for (int i = 0; i < 4; ++i) w[i] = here ? *(const float4*)(heads + ((h + i) * THREADS + tid) * 4) : __ldg((const float4*)(mine + (h + i) * COLUMNS));
#pragma unroll
                        for (int r = 0; r < ROWS; ++r) {
                            const float4 v = *(const float4*)(hidden + r * (H + W) + head_share * HEAD_SPAN + h);
                            made[r].x += v.x * w[0].x + v.y * w[1].x + v.z * w[2].x + v.w * w[3].x;
                            made[r].y += v.x * w[0].y + v.y * w[1].y + v.z * w[2].y + v.w * w[3].y;
                            made[r].z += v.x * w[0].z + v.y * w[1].z + v.z * w[2].z + v.w * w[3].z;
                            made[r].w += v.x * w[0].w + v.y * w[1].w + v.z * w[2].w + v.w * w[3].w;
                        }
                    };
                    const int end = head_share < HEAD_SHARES ? HEAD_SPAN : 0;
                    constexpr int AT_ONCE = ROWS > 4 ? 1 : 2;
#pragma unroll AT_ONCE
                    for (int h = HEAD_KEPT; h < end; h += 4) four(h, false);
#pragma unroll AT_ONCE
                    for (int h = 0; h < min(HEAD_KEPT, end); h += 4) four(h, true);
#pragma unroll
                    for (int r = 0; end && r < ROWS; ++r) *(float4*)(part + (r * HEAD_SHARES + head_share) * COLUMNS + column) = made[r];
                    __syncthreads();
                    for (int i = tid; i < ROWS * COLUMNS; i += THREADS) {
                        const int r = i / COLUMNS, o = i % COLUMNS;
                        float whole = biases[o];
#pragma unroll
                        for (int p = 0; p < HEAD_SHARES; ++p) whole += part[(r * HEAD_SHARES + p) * COLUMNS + o];
                        logit[i] = whole;
                    }
                }
                __syncthreads();
            }

            // the action, and the realised move
            const i64 at = ((i64)t * seeds + s) * batch + b;
            bool goes = false, alive = false;
            int action = 0, move = 0;
            if (walks && TRACE && !NETWORK && lane == 0) numbers[at] = (int)number;
            if (walks && TRACE && NETWORK && W && lane == 0) entries[ROW(t, b)] = entry[warp];
            if (walks && t < T) {
                const float* thrown = coins + (t % 2 * ROWS + warp) * 2;
                const bool explores = thrown[0] < chance;
                float best = -3e38f, drawn = -3e38f;
                int other = 0;
                bool any = false;
                const float* given = !NETWORK ? early + ((i64)s * early_rows + number) * EARLY_WIDTH : logit + warp * COLUMNS;
                for (int m = lane; m < M; m += 32) {
                    const int to = (t % 2 * ROWS + warp) * COLUMNS + m;
                    const bool legal = APPEND ? m < SIZE && length < D : m < D && state[warp * D + m] < SIZE - 1;
                    const bool open = legal || (m == STOP && (!APPEND || length >= LEAST));
                    float z = given[m];
                    z = explores || z != z ? 0.f : z;  // a seed whose weights are NaN stays in range
                    z = open ? fmaxf(z, -1e8f) + noise[to] : -1e9f;
                    if (z > best) best = z, action = m;
                    const float u = SLIPS && legal ? slip_noise[to] : -1.f;
                    if (u > drawn) drawn = u, other = m;
                    any |= legal;
                }
                move = action = argmax(best, action);
                if (SLIPS) {
                    other = argmax(drawn, other);
                    if (thrown[1] < alpha && action != STOP) move = other;
                }
                alive = __any_sync(~0u, any) && !stopped;
                stopped |= action == STOP;
                goes = alive && move != STOP;
                if (lane == 0) {
                    feature[warp] = !goes ? -1 : APPEND ? length * SIZE + move : move * SIZE + state[warp * D + move] + 1;
                    if (goes) state[warp * D + (APPEND ? length : move)] = APPEND ? move : state[warp * D + move] + 1;
                }
                if (goes) {  // the number of the next state, in the environment's order
                    length += 1;
                    i64 place_value = 1;
                    for (int d = APPEND ? D : move + 1; d < D; ++d) place_value *= SIZE;
                    number = APPEND ? number * SIZE + 1 + move : number + place_value;
                    if (W && lane == 0) entry[warp] = (int)(number < table_rows ? number : table_rows - 1);
                }
            }
            if (t + 1 < T) prepare(t + 1);
            if (!NETWORK) __syncwarp();
            going = NETWORK ? __syncthreads_or(goes) : goes;

            // results of the step, and the features that it changes
            if (walks) {
                if (TRACE && NETWORK)
                    for (int o = lane; o < COLUMNS; o += 32)
                        outs[ROW(t, b) * COLUMNS + o] = o < (SMALL_HEAD ? OUT : M) ? logit[warp * COLUMNS + o] : 0.f;
                if (t < T) {
                    if (lane == 0) {
                        actions[at] = action;
                        moves[at] = move;
                        alives[at] = alive;
                    }
                    for (int d = lane; d < D; d += 32) states[(at + (i64)seeds * batch) * D + d] = state[warp * D + d];
                }
            }
            if (NETWORK && going && t + 1 < END) {
#pragma unroll
                for (int i = 0; i < OWNED; ++i) {
                    const int r = i * OWNERS + owner, f = r < ROWS ? feature[r] : -1;
                    if (f < 0) continue;
                    total[i] += rows[(i64)f * H + own] - (APPEND ? 0.f : rows[(i64)(f - 1) * H + own]);
                    x[r * WIDE + own] = fmaxf(total[i], 0.f);
                    if (TRACE) sums[ROW(t + 1, from + r) * H + own] = total[i];
                }
                for (int i = tid; i < ROWS * W; i += THREADS) {
                    const int r = i / (W + !W), at = i % (W + !W);
                    if (feature[r] >= 0) hidden[r * (H + W) + H + at] = table[(i64)entry[r] * W + at];
                }
            }
            wait();
        }

        if (walks && lane == 0) final_numbers[(i64)s * batch + b] = HANDS_ON && stopped ? ~number : number;
        if (walks)  // all have finished: the rest is padding
            for (; t < END; ++t) {
                const i64 at = ((i64)t * seeds + s) * batch + b;
                if (TRACE && lane == 0 && !NETWORK) numbers[at] = (int)number;
                if (t < T) {
                    if (lane == 0) {
                        actions[at] = moves[at] = STOP < 0 ? 0 : STOP;
                        alives[at] = 0;
                    }
                    for (int d = lane; d < D; d += 32) states[(at + (i64)seeds * batch) * D + d] = state[warp * D + d];
                }
            }
        wait();
    }
}
