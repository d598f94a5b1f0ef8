// What a balance says to every output of the network, from what a rollout kept of them: log-probabilities of the moves, residuals, slopes; and which
// states were reached. A thread takes a state, or of a network with many outputs a warp; LANES threads take a trajectory.
//
// Defined by the host (balance_kernel.py): T steps at most, N states a trajectory, STRING (else a grid), D columns of a state, SIZE of the alphabet
// or the grid's side, M moves, STOP among them (-1: none), LEAST letters before it, COLUMNS of outputs, LEARNED (the way back has outputs of its
// own, after those of the moves), FLOW (the output that is the flow), GROUP lanes a state (1 or 32), LANES, THREADS, EARLY steps whose states all share,
// LISTED (the states that were reached are to be listed), NOISY (a move may come of other actions), DETAILED (a residual a step; else one a trajectory).

#define EACH (COLUMNS / GROUP)                      // outputs a thread
#define OUTPUT(i) ((i) * GROUP + tid % GROUP)       // which they are
#define TOGETHER (THREADS / LANES)                  // trajectories a block
#define WARPS_EACH (LANES > 32 ? LANES / 32 : 1)    // warps a trajectory
#define STRIDE (LANES / GROUP)                      // states at a time; the others come later, and are looked at twice

#define MOVES (GROUP == 1 ? M : EACH)  // of a thread's outputs, in front
#define BACK(d) (LEARNED ? M + (d) : 0)  // the output for the way back along a column (of a grid, whose heads are small)
#define USED (DETAILED ? FLOW + 1 : LEARNED ? M + D : M)  // outputs that the loss speaks to

// Four numbers in a row, each added atomically.
__device__ __forceinline__ void add(float* to, float4 four) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(four.x), "f"(four.y), "f"(four.z), "f"(four.w) : "memory");
#else
    atomicAdd(to, four.x), atomicAdd(to + 1, four.y), atomicAdd(to + 2, four.z), atomicAdd(to + 3, four.w);
#endif
}

// Sums over the threads of a state.
__device__ __forceinline__ float added(float value) {
#pragma unroll
    for (int offset = GROUP / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
    return value;
}
__device__ __forceinline__ float highest(float value) {
#pragma unroll
    for (int offset = GROUP / 2; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, offset));
    return value;
}

// Over those of a trajectory: every warp of a block calls it.
__device__ __forceinline__ float whole(float value) {
    __shared__ float of_warps[THREADS / 32];
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int offset = (LANES < 32 ? LANES : 32) / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
    if (WARPS_EACH == 1) return value;
    __syncthreads();
    of_warps[warp] = value;
    __syncthreads();
    value = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS_EACH; ++w) value += of_warps[w];  // several warps: the block has one trajectory
    return value;
}

struct State {
    bool alive, came, known;  // a decision was taken; a real move led here; it was reached
    int row;
    float log_p, log_b, flow, entropy;
    float onward[EACH], backward[EACH];  // d log p / d outputs, d log P_B of the step before / d outputs
};

extern "C" __global__ void __launch_bounds__(THREADS) residuals(
    float* slopes,                                                            // [S, rows, COLUMNS] what the loss says to each output
    float* losses, float* estimates, float* entropies, float* to_log_z, int* reached,  // [S, B] of each trajectory: its part of the loss, what it
    // takes log Z for, the entropy of its policy, summed over its steps, what it says to log Z, the number of its states
    int* met, int* counts,  // with LISTED: [S, rows - early_states] the late states of all, in any order, and [S] how many they are
    const float* outs, const int* numbers, const i64* states, const i64* moves, const signed char* alives,
    const float* log_ks,  // [T, S, B, M] with NOISY: log P(the realised move | each action)
    const i64* taken,     // [S] decisions, with DETAILED where not all go on to the end
    const float* log_rewards, const i64* finals,  // [S, B]; `by_number`: of all states, of which finals [S, B] are looked up
    const float* log_z_unit, double z_scale, int by_number, int seeds, int batch, int rows, int early_states) {
    __shared__ float next_flow[TOGETHER * (N + 1)], next_back[TOGETHER * (N + 1)], pulls[TOGETHER * (N + 1)];
    const int s = blockIdx.y, tid = threadIdx.x, segment = tid / LANES, b = blockIdx.x * TOGETHER + segment;
    const int begin = tid % LANES / GROUP;
    const bool there = b < batch;

    auto look = [&](int t, State& x) {
        // loads wait for one another as little as may be: what is read of a state that was not reached is not used
        const bool inside = there && t < N, decides = inside && t < T, follows = !STRING && inside && t > 0;
        const i64 at = ((i64)t * seeds + s) * batch + b, before = at - (i64)seeds * batch;
        const int drawn = decides ? (int)moves[at] : -2, by = follows ? (int)moves[before] : STOP;
        x.alive = decides && alives[at];
        x.came = follows && alives[before] && by != STOP;
        x.known = inside && (STRING ? x.alive : x.came || t == 0);
        x.row = !inside ? 0 : t < EARLY ? numbers[at] : early_states + (t - EARLY) * batch + b;
        x.log_p = x.log_b = x.flow = x.entropy = 0.f;
        const float* from = outs + ((i64)s * rows + x.row) * COLUMNS;
        const i64* state = states + (inside ? at * D : 0);
        float out[EACH];
        if (GROUP == 1) {
#pragma unroll
            for (int i = 0; i < EACH; i += 4) {
                const float4 four = *(const float4*)(from + i);
                out[i] = four.x, out[i + 1] = four.y, out[i + 2] = four.z, out[i + 3] = four.w;
            }
        } else {
#pragma unroll
            for (int i = 0; i < EACH; ++i) out[i] = from[OUTPUT(i)];
        }
        const int move = x.alive ? drawn : -2;
        float z[MOVES], came_of[MOVES], top = -3e38f, total = 0.f, moment = 0.f, chosen = 0.f;
#pragma unroll
        for (int i = 0; i < MOVES; ++i) {
            const int o = OUTPUT(i);
            const bool open = STRING ? o < SIZE || (o == STOP && t >= LEAST) : o == STOP || state[o < D ? o : 0] < SIZE - 1;
            z[i] = x.alive && open && o < M ? out[i] : -1e9f;
            top = fmaxf(top, z[i]);
        }
        top = highest(top);
#pragma unroll
        for (int i = 0; i < EACH; ++i) x.onward[i] = x.backward[i] = 0.f;
#pragma unroll
        for (int i = 0; i < MOVES; ++i) {
            x.onward[i] = expf(z[i] - top);
            total += x.onward[i];
            moment += x.onward[i] * (z[i] - top);
        }
        total = added(total);
        moment = added(moment);
        if (NOISY) {  // the actions that may have led to the move, each with its share
            float most = -3e38f, ways = 0.f;
#pragma unroll
            for (int i = 0; i < MOVES; ++i) {
                const int o = OUTPUT(i);
                const float log_k = o == STOP || move == STOP ? (o == move ? 0.f : -1e9f) : decides && o < M ? log_ks[at * M + o] : 0.f;
                came_of[i] = z[i] > -5e8f ? z[i] + log_k : -2e9f;
                most = fmaxf(most, came_of[i]);
            }
            most = highest(most);
#pragma unroll
            for (int i = 0; i < MOVES; ++i) ways += came_of[i] = expf(came_of[i] - most);
            ways = added(ways);
#pragma unroll
            for (int i = 0; i < MOVES; ++i) came_of[i] /= ways;
            chosen = most + logf(ways);
        } else {
#pragma unroll
            for (int i = 0; i < MOVES; ++i) {
                came_of[i] = OUTPUT(i) == move ? 1.f : 0.f;
                if (OUTPUT(i) == move) chosen = z[i];
            }
            chosen = added(chosen);
        }
        if (x.alive) {
            x.log_p = chosen - top - logf(total);
            x.entropy = logf(total) - moment / total;
            if (DETAILED) x.flow = out[GROUP == 1 ? FLOW : 0];
        }
#pragma unroll
        for (int i = 0; i < MOVES; ++i) x.onward[i] = x.alive ? came_of[i] - x.onward[i] / total : 0.f;
        if (!STRING && x.came) {  // a state of the grid has several parents: the probability of the one it came from
            float most = -3e38f, ways = 0.f, parents = 0.f;
            if (LEARNED) {
#pragma unroll
                for (int d = 0; d < D; ++d) {
                    x.backward[BACK(d)] = state[d] > 0 ? out[BACK(d)] : -1e9f;
                    most = fmaxf(most, x.backward[BACK(d)]);
                    if (d == by) x.log_b = out[BACK(d)];
                }
#pragma unroll
                for (int d = 0; d < D; ++d) ways += x.backward[BACK(d)] = expf(x.backward[BACK(d)] - most);
                x.log_b -= most + logf(ways);
#pragma unroll
                for (int d = 0; d < D; ++d) x.backward[BACK(d)] = (d == by ? 1.f : 0.f) - x.backward[BACK(d)] / ways;
            } else {
                for (int d = 0; d < D; ++d) parents += state[d] > 0 ? 1.f : 0.f;
                x.log_b = -logf(fmaxf(parents, 1.f));
            }
        }
    };

    const float log_z = (float)z_scale * log_z_unit[s], log_reward = there ? log_rewards[by_number ? finals[s * batch + b] : s * batch + b] : 0.f;

    // all states, for what the trajectory says as a whole
    State x;
    float travelled = 0.f, entropy = 0.f, met_here = 0.f;
    const bool counts_once = tid % GROUP == 0;
    for (int t = begin; t < (N + STRIDE - 1) / STRIDE * STRIDE; t += STRIDE) {
        look(t, x);
        if (!counts_once) continue;
        travelled += x.log_p - x.log_b;
        entropy += x.entropy;
        met_here += x.known ? 1.f : 0.f;
        if (DETAILED && t < N) {
            next_flow[segment * (N + 1) + t] = x.flow;
            next_back[segment * (N + 1) + t] = x.log_b;
        }
    }
    travelled = whole(travelled);
    entropy = whole(entropy);
    met_here = whole(met_here);
    const float estimate = log_reward - travelled;
    float loss = (log_z - estimate) * (log_z - estimate), pull = 2.f * (log_z - estimate) / batch, before = pull, to_z = pull;
    if (DETAILED) {  // one state a thread (balance_kernel.fits)
        const int t = begin, mine = segment * (N + 1) + t;
        const float share = 1.f / (STRING && STOP < 0 ? (float)T * batch : (float)taken[s]);
        const bool goes_on = there && t < T - 1 && alives[((i64)(t + 1) * seeds + s) * batch + b];
        __syncthreads();
        const float onto = goes_on ? next_flow[mine + 1] + log_z : log_reward;
        const float residual = x.alive ? x.flow + log_z + x.log_p - onto - (t + 1 < N ? next_back[mine + 1] : 0.f) : 0.f;
        pull = 2.f * share * residual;
        if (t < N) pulls[mine] = pull;
        __syncthreads();
        before = t > 0 && t < N ? pulls[mine - 1] : 0.f;
        loss = whole(residual * residual) * share * batch;
        to_z = whole(goes_on ? 0.f : pull);
    }

    int place = 0;
    if (LISTED) {
        const int late = max((int)met_here - EARLY, 0);
        __shared__ int places[TOGETHER];
        if (there && tid % LANES == 0 && late > 0) places[segment] = atomicAdd(counts + s, late);
        __syncthreads();
        place = s * (rows - early_states) + places[segment];
    }
    if (there && tid % LANES == 0) {
        const int at = s * batch + b;
        losses[at] = loss;
        estimates[at] = estimate;
        entropies[at] = entropy;
        to_log_z[at] = to_z;
        reached[at] = (int)met_here;
    }
    for (int t = begin; t < (N + STRIDE - 1) / STRIDE * STRIDE; t += STRIDE) {
        if (N > STRIDE) look(t, x);
        if (!x.known) continue;  // nobody will ask
        float* to = slopes + ((i64)s * rows + x.row) * COLUMNS;
        if (LISTED && t >= EARLY && tid % GROUP == 0) met[place + t - EARLY] = x.row;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            x.onward[i] = pull * x.onward[i] - before * x.backward[i];
            if (DETAILED && x.alive && OUTPUT(i) == FLOW) x.onward[i] += pull - before;
        }
        if (GROUP == 1) {
#pragma unroll
            for (int i = 0; i < EACH; i += 4) {
                const float4 four = make_float4(x.onward[i], x.onward[i + 1], x.onward[i + 2], x.onward[i + 3]);
                if (t >= EARLY)
                    *(float4*)(to + i) = four;
                else if (i < USED)
                    add(to + i, four);
            }
        } else {
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                if (t >= EARLY)
                    to[OUTPUT(i)] = x.onward[i];
                else
                    atomicAdd(to + OUTPUT(i), x.onward[i]);
            }
        }
    }
}
