// Gradients of the weights and biases of a network with two hidden layers: sums over states of input times gradient of the
// output.
//
// A block of threads makes TILE x TILE numbers of one layer's gradient from a share of the states, on tensor cores. States
// come through shared memory, DEPTH at a time, while those before are multiplied. Where there are several shares, results
// are added atomically to zeros.
//
// Defines (gradient.py): H hidden units, OUT outputs, COLUMNS of them with gradients, D columns of a state, SIZE values each,
// FEATURES together, W width of a look-up table whose rows are inputs of the head beside the hidden units (0: none), LISTED
// (states that were reached are in a list; else all are), TILE (64), DEPTH (32), STAGES of copies in flight.

#define THREADS 128
#define STRIDE (TILE + 8)  // of a row in shared memory: no bank conflicts
#define TILES(n) (((n) + TILE - 1) / TILE)

__device__ __forceinline__ void put(float* to, float value) {
    if (gridDim.y > 1)
        atomicAdd(to, value);
    else
        *to = value;
}

// A layer: inputs [.., width] times gradients of the outputs [.., given], into [width, outputs]. With `entries` the inputs are
// rows of a table, one per late state, and there is no bias; else they are activations before or after a rectifier.
struct Layer {
    float *d_weight, *d_bias;
    const float *inputs, *d_outputs;
    int width, outputs, given;
    const int* entries;
};

// One tile of a layer's gradient. FLAGS: the inputs are the one-hot features of the states.
template <bool FLAGS>
__device__ __forceinline__ void block(const Layer& layer, const i64* early, const i64* path, const int* list, int s, int row, int column, int begin,
                                      int end, int seeds, int batch, int early_steps, int early_states) {
    extern __shared__ float memory[];
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    const int k4 = tid / 16, n4 = tid % 16 * 4;  // this thread copies four columns of rows k4, k4 + 8, ...
    const int m0 = warp / 2 * 32 + lane / 4, n0 = warp % 2 * 32 + lane / 4;
    float sum[2][4][4] = {}, total = 0.f;

    auto state = [&](int i) { return !LISTED || i < early_states ? i : list[i - early_states]; };
    int next[4], flagged = 0;  // states of the next copy
    auto look = [&](int start) {
#pragma unroll
        for (int q = 0; q < 4; ++q) next[q] = start + k4 + 8 * q < end ? state(start + k4 + 8 * q) : -1;
        if (FLAGS) flagged = start + tid / 4 < end ? state(start + tid / 4) : -1;
    };
    auto copy = [&](int stage) {
        float* a = memory + stage * 2 * DEPTH * STRIDE;
        float* b = a + DEPTH * STRIDE;
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const i64 at = next[q] < 0 ? 0 : next[q];
            const int m = row * TILE + n4, n = column * TILE + n4;
            const bool there = next[q] >= 0 && n < layer.given, known = next[q] >= 0 && m < layer.width;
            const i64 from = layer.entries && at >= early_states ? layer.entries[at] : at;
            if (!FLAGS) copy_async<16>(a + (k4 + 8 * q) * STRIDE + n4, layer.inputs + from * layer.width + (known ? m : 0), known);
            copy_async<16>(b + (k4 + 8 * q) * STRIDE + n4, layer.d_outputs + at * layer.given + (there ? n : 0), there);
        }
        if (FLAGS) {
            const int late = flagged - early_states;
            const i64* columns = flagged < 0    ? path
                                 : late < 0     ? early + (i64)flagged * D
                                                : path + ((i64)(late / batch + early_steps) * seeds * batch + (i64)s * batch + late % batch) * D;
            float* flags = a + tid / 4 * STRIDE;  // by four threads
#pragma unroll
            for (int i = 0; i < 4; ++i) *(float4*)(flags + (tid % 4 * 4 + i) * 4) = make_float4(0.f, 0.f, 0.f, 0.f);
            __syncwarp();
            for (int d = tid % 4; flagged >= 0 && d < D; d += 4) {
                const int value = (int)columns[d], f = d * SIZE + value - row * TILE;
                if (value < SIZE && f >= 0 && f < TILE) flags[f] = 1.f;
            }
        }
    };

    const int chunks = (end - begin + DEPTH - 1) / DEPTH;
    look(begin);
    for (int c = 0; c < STAGES - 1; ++c) {
        if (c < chunks) copy(c);
        asm volatile("cp.async.commit_group;");
        look(begin + (c + 1) * DEPTH);
    }
    for (int c = 0; c < chunks; ++c) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2));
        __syncthreads();
        if (c + STAGES - 1 < chunks) copy((c + STAGES - 1) % STAGES);
        asm volatile("cp.async.commit_group;");
        look(begin + (c + STAGES) * DEPTH);
        const float* a = memory + c % STAGES * 2 * DEPTH * STRIDE;
        const float* b = a + DEPTH * STRIDE;
#pragma unroll
        for (int k = lane % 4; k < DEPTH; k += 8) {
            u32 a_lead[2][4], a_trail[2][4], b_lead[4][2], b_trail[4][2];
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const float value = a[(k + e / 2 * 4) * STRIDE + m0 + i * 16 + e % 2 * 8];
                    split(layer.entries ? value : fmaxf(value, 0.f), a_lead[i][e], a_trail[i][e]);
                }
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e) split(b[(k + e * 4) * STRIDE + n0 + j * 8], b_lead[j][e], b_trail[j][e]);
#pragma unroll
            for (int product = FLAGS; product < 3; ++product)  // in an order without dependent neighbours
#pragma unroll
                for (int i = 0; i < 2; ++i)
#pragma unroll
                    for (int j = 0; j < 4; ++j) multiply(sum[i][j], product ? a_lead[i] : a_trail[i], product == 1 ? b_trail[j] : b_lead[j]);
        }
        if (!layer.entries && row == 0 && tid < TILE)
#pragma unroll
            for (int k = 0; k < DEPTH; ++k) total += b[k * STRIDE + tid];
    }

#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int m = row * TILE + m0 + i * 16 + e / 2 * 8, n = column * TILE + warp % 2 * 32 + j * 8 + lane % 4 * 2 + e % 2;
                if (m < layer.width && n < layer.outputs) put(layer.d_weight + (i64)m * layer.outputs + n, sum[i][j][e]);
            }
    if (!layer.entries && row == 0 && tid < TILE && column * TILE + tid < layer.outputs) put(layer.d_bias + column * TILE + tid, total);
}

// The grid: tiles (of the second layer, of the head, of its inputs from the table, and, if any, of the first layer) x shares x
// seeds.
extern "C" __global__ void __launch_bounds__(THREADS, 4) weight_gradients(
    float* d_first, float* d_first_bias, float* d_second, float* d_second_bias, float* d_head, float* d_head_bias, float* d_log_z,
    const i64* early, const i64* path,  // [early_states, D], [T+1, S, B, D] states
    const int* list, const int* counts,  // [S, rows - early_states] late states that were reached, [S]
    const float* sums, const float* hiddens,  // [S, rows, H]
    const float* table, const int* entries,  // [S, table_rows, W], [S, rows] its row for a late state
    const float* d_outputs, const float* d_hidden, const float* d_sums,  // [S, rows, ...]
    const float* d_log_z_each,  // [S, B] of each trajectory
    double z_scale, int seeds, int batch, int rows, int early_steps, int early_states, int table_rows) {
    const int s = blockIdx.z, p = blockIdx.x, many = LISTED ? early_states + counts[s] : rows;
    const int share = (many + DEPTH * gridDim.y - 1) / (DEPTH * gridDim.y) * DEPTH;
    const int begin = blockIdx.y * share, end = min(many, begin + share);

    if (p == 0 && blockIdx.y == 0) {
        float total = 0.f;
        for (int b = threadIdx.x; b < batch; b += THREADS) total += d_log_z_each[s * batch + b];
        for (int offset = 16; offset > 0; offset /= 2) total += __shfl_xor_sync(~0u, total, offset);
        __shared__ float each[THREADS / 32];
        if (threadIdx.x % 32 == 0) each[threadIdx.x / 32] = total;
        __syncthreads();
        if (threadIdx.x == 0) d_log_z[s] = (float)z_scale * (each[0] + each[1] + each[2] + each[3]);
    }
    if (gridDim.y > 1 && begin >= end) return;

    const i64 at = (i64)s * rows;
    list += (i64)s * (rows - early_states);
    constexpr int ACROSS = TILES(H), OUTPUTS = TILES(OUT), SECOND = ACROSS * ACROSS, HEAD = ACROSS * OUTPUTS, TABLE = TILES(W) * OUTPUTS;
    d_head += (i64)s * (H + W) * OUT;
    if (p < SECOND + HEAD + TABLE) {
        Layer layer = {d_second + s * H * H, d_second_bias + s * H, sums + at * H, d_hidden + at * H, H, H, H, nullptr};
        int q = p;
        if (p >= SECOND) {
            q = p - SECOND;
            layer = {d_head, d_head_bias + s * OUT, hiddens + at * H, d_outputs + at * COLUMNS, H, OUT, COLUMNS, nullptr};
        }
        if (p >= SECOND + HEAD) {
            q = p - SECOND - HEAD;
            layer.d_weight += H * OUT;
            layer.inputs = table + (i64)s * table_rows * W;
            layer.width = W;
            layer.entries = entries + at;
        }
        const int wide = p < SECOND ? ACROSS : OUTPUTS;
        block<false>(layer, early, path, list, s, q / wide, q % wide, begin, end, seeds, batch, early_steps, early_states);
    } else {
        const int q = p - SECOND - HEAD - TABLE;
        const Layer layer = {d_first + (i64)s * FEATURES * H, d_first_bias + s * H, nullptr, d_sums + at * H, FEATURES, H, H, nullptr};
        block<true>(layer, early, path, list, s, q / ACROSS, q % ACROSS, begin, end, seeds, batch, early_steps, early_states);
    }
}
