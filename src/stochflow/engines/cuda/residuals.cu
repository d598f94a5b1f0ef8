// Log-probabilities of the moves, residuals of the objective, and the gradient of the loss with respect to every output of
// the network, from the outputs of a traced walk; and a list of the states that were reached. A state takes one thread, or
// a warp where the network has many outputs; LANES threads take a trajectory.
//
// Defines (gradient.py):
//   APPEND, D, SIZE, LEAST, STOP, M, T: the world; N: states of a trajectory that have outputs
//   COLUMNS: outputs per row; LEARNED: the backward policy has outputs, after those of the moves; FLOW: the output that is the flow
//   GROUP: lanes per state (1 or 32); LANES: per trajectory; THREADS: per block
//   EARLY: steps whose states are shared; LISTED: states that were reached must be listed (else all are)
//   NOISY: a move may come from other actions; DETAILED: a residual per step (else per trajectory)

#define EACH (COLUMNS / GROUP)                      // outputs per thread
#define OUTPUT(i) ((i) * GROUP + tid % GROUP)       // which they are
#define TOGETHER (THREADS / LANES)                  // trajectories per block
#define WARPS_EACH (LANES > 32 ? LANES / 32 : 1)    // warps per trajectory
#define STRIDE (LANES / GROUP)                      // states at once; others come later, and are computed twice

#define MOVES (GROUP == 1 ? M : EACH)  // of a thread's outputs, the first ones
#define BACK(d) (LEARNED ? M + (d) : 0)  // backward logit of a column (of a lattice, whose heads are small)
#define USED (DETAILED ? FLOW + 1 : LEARNED ? M + D : M)  // outputs with a gradient

// Four neighbouring numbers, each added atomically.
__device__ __forceinline__ void add(float* to, float4 four) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(four.x), "f"(four.y), "f"(four.z), "f"(four.w) : "memory");
#else
    atomicAdd(to, four.x), atomicAdd(to + 1, four.y), atomicAdd(to + 2, four.z), atomicAdd(to + 3, four.w);
#endif
}

// Sum and maximum over the threads of a state.
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

// Sum over the threads of a trajectory: every warp of a block calls it.
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
    float d_forward[EACH], d_backward[EACH];  // of log p, and of log P_B of the step before
};

extern "C" __global__ void __launch_bounds__(THREADS) residuals(
    float* d_outs,  // [S, rows, COLUMNS]
    float* losses, float* estimates, float* entropies, float* d_log_z, int* reached,
    // [S, B] of each trajectory: part of the loss, estimate of log Z, entropy summed over steps, gradient of log Z, states
    int* list, int* counts,  // with LISTED: [S, rows - early_states] late states reached, in any order, and [S] their number
    const float* outs, const int* numbers, const i64* states, const i64* moves, const signed char* alives,
    const float* log_ks,  // [T, S, B, M] with NOISY: log P(the realised move | each action)
    const i64* decisions,  // [S] with DETAILED, where trajectories may end early
    const float* log_rewards, const i64* final_numbers,  // [S, B]; `by_number`: of all states, looked up by final_numbers [S, B]
    const float* log_z_unit, double z_scale, int by_number, int seeds, int batch, int rows, int early_states) {
    __shared__ float next_flow[TOGETHER * (N + 1)], next_back[TOGETHER * (N + 1)], d_residuals[TOGETHER * (N + 1)];
    const int s = blockIdx.y, tid = threadIdx.x, segment = tid / LANES, b = blockIdx.x * TOGETHER + segment;
    const int begin = tid % LANES / GROUP;
    const bool there = b < batch;

    auto load = [&](int t, State& x) {
        // loads are independent of one another: values of a state that was not reached are read and not used
        const bool inside = there && t < N, decides = inside && t < T, follows = !APPEND && inside && t > 0;
        const i64 at = ((i64)t * seeds + s) * batch + b, before = at - (i64)seeds * batch;
        const int drawn = decides ? (int)moves[at] : -2, by = follows ? (int)moves[before] : STOP;
        x.alive = decides && alives[at];
        x.came = follows && alives[before] && by != STOP;
        x.known = inside && (APPEND ? x.alive : x.came || t == 0);
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
        float z[MOVES], posterior[MOVES], top = -3e38f, total = 0.f, moment = 0.f, chosen = 0.f;
#pragma unroll
        for (int i = 0; i < MOVES; ++i) {
            const int o = OUTPUT(i);
            const bool open = APPEND ? o < SIZE || (o == STOP && t >= LEAST) : o == STOP || state[o < D ? o : 0] < SIZE - 1;
            z[i] = x.alive && open && o < M ? out[i] : -1e9f;
            top = fmaxf(top, z[i]);
        }
        top = highest(top);
#pragma unroll
        for (int i = 0; i < EACH; ++i) x.d_forward[i] = x.d_backward[i] = 0.f;
#pragma unroll
        for (int i = 0; i < MOVES; ++i) {
            x.d_forward[i] = expf(z[i] - top);
            total += x.d_forward[i];
            moment += x.d_forward[i] * (z[i] - top);
        }
        total = added(total);
        moment = added(moment);
        if (NOISY) {  // the posterior of the action given the move
            float most = -3e38f, norm = 0.f;
#pragma unroll
            for (int i = 0; i < MOVES; ++i) {
                const int o = OUTPUT(i);
                const float log_k = o == STOP || move == STOP ? (o == move ? 0.f : -1e9f) : decides && o < M ? log_ks[at * M + o] : 0.f;
                posterior[i] = z[i] > -5e8f ? z[i] + log_k : -2e9f;
                most = fmaxf(most, posterior[i]);
            }
            most = highest(most);
#pragma unroll
            for (int i = 0; i < MOVES; ++i) norm += posterior[i] = expf(posterior[i] - most);
            norm = added(norm);
#pragma unroll
            for (int i = 0; i < MOVES; ++i) posterior[i] /= norm;
            chosen = most + logf(norm);
        } else {
#pragma unroll
            for (int i = 0; i < MOVES; ++i) {
                posterior[i] = OUTPUT(i) == move ? 1.f : 0.f;
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
        for (int i = 0; i < MOVES; ++i) x.d_forward[i] = x.alive ? posterior[i] - x.d_forward[i] / total : 0.f;
        if (!APPEND && x.came) {  // a lattice point has several parents: P_B of the one it came from
            float most = -3e38f, norm = 0.f, parents = 0.f;
            if (LEARNED) {
#pragma unroll
                for (int d = 0; d < D; ++d) {
                    x.d_backward[BACK(d)] = state[d] > 0 ? out[BACK(d)] : -1e9f;
                    most = fmaxf(most, x.d_backward[BACK(d)]);
                    if (d == by) x.log_b = out[BACK(d)];
                }
#pragma unroll
                for (int d = 0; d < D; ++d) norm += x.d_backward[BACK(d)] = expf(x.d_backward[BACK(d)] - most);
                x.log_b -= most + logf(norm);
#pragma unroll
                for (int d = 0; d < D; ++d) x.d_backward[BACK(d)] = (d == by ? 1.f : 0.f) - x.d_backward[BACK(d)] / norm;
            } else {
                for (int d = 0; d < D; ++d) parents += state[d] > 0 ? 1.f : 0.f;
                x.log_b = -logf(fmaxf(parents, 1.f));
            }
        }
    };

    const float log_z = (float)z_scale * log_z_unit[s], log_reward = there ? log_rewards[by_number ? final_numbers[s * batch + b] : s * batch + b] : 0.f;

    // all states, for the sums of the trajectory
    State x;
    float log_ratio = 0.f, entropy = 0.f, reached_here = 0.f;
    const bool counts_once = tid % GROUP == 0;
    for (int t = begin; t < (N + STRIDE - 1) / STRIDE * STRIDE; t += STRIDE) {
        load(t, x);
        if (!counts_once) continue;
        log_ratio += x.log_p - x.log_b;
        entropy += x.entropy;
        reached_here += x.known ? 1.f : 0.f;
        if (DETAILED && t < N) {
            next_flow[segment * (N + 1) + t] = x.flow;
            next_back[segment * (N + 1) + t] = x.log_b;
        }
    }
    log_ratio = whole(log_ratio);
    entropy = whole(entropy);
    reached_here = whole(reached_here);
    const float estimate = log_reward - log_ratio;
    float loss = (log_z - estimate) * (log_z - estimate), d_residual = 2.f * (log_z - estimate) / batch, before = d_residual, d_z = d_residual;
    if (DETAILED) {  // one state per thread (gradient.py sees to it)
        const int t = begin, mine = segment * (N + 1) + t;
        const float share = 1.f / (APPEND && STOP < 0 ? (float)T * batch : (float)decisions[s]);
        const bool goes_on = there && t < T - 1 && alives[((i64)(t + 1) * seeds + s) * batch + b];
        __syncthreads();
        const float onto = goes_on ? next_flow[mine + 1] + log_z : log_reward;
        const float residual = x.alive ? x.flow + log_z + x.log_p - onto - (t + 1 < N ? next_back[mine + 1] : 0.f) : 0.f;
        d_residual = 2.f * share * residual;
        if (t < N) d_residuals[mine] = d_residual;
        __syncthreads();
        before = t > 0 && t < N ? d_residuals[mine - 1] : 0.f;
        loss = whole(residual * residual) * share * batch;
        d_z = whole(goes_on ? 0.f : d_residual);
    }

    int place = 0;
    if (LISTED) {
        const int late = max((int)reached_here - EARLY, 0);
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
        d_log_z[at] = d_z;
        reached[at] = (int)reached_here;
    }
    for (int t = begin; t < (N + STRIDE - 1) / STRIDE * STRIDE; t += STRIDE) {
        if (N > STRIDE) load(t, x);
        if (!x.known) continue;  // not reached: no gradient
        float* to = d_outs + ((i64)s * rows + x.row) * COLUMNS;
        if (LISTED && t >= EARLY && tid % GROUP == 0) list[place + t - EARLY] = x.row;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            x.d_forward[i] = d_residual * x.d_forward[i] - before * x.d_backward[i];
            if (DETAILED && x.alive && OUTPUT(i) == FLOW) x.d_forward[i] += d_residual - before;
        }
        if (GROUP == 1) {
#pragma unroll
            for (int i = 0; i < EACH; i += 4) {
                const float4 four = make_float4(x.d_forward[i], x.d_forward[i + 1], x.d_forward[i + 2], x.d_forward[i + 3]);
                if (t >= EARLY)
                    *(float4*)(to + i) = four;
                else if (i < USED)
                    add(to + i, four);
            }
        } else {
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                if (t >= EARLY)
                    to[OUTPUT(i)] = x.d_forward[i];
                else
                    atomicAdd(to + OUTPUT(i), x.d_forward[i]);
            }
        }
    }
}
