// Backward pass through a layer: the gradient with respect to its inputs is that of its outputs times its weights, where the
// input was above zero. A block of threads makes TILE states x TILE inputs of one seed on tensor cores, then others; outputs
// come through shared memory, DEPTH at a time, while those before are multiplied.
//
// Some inputs of a head may be a row of a look-up table, which has no rectifier: their gradient is added to that row's.
//
// Defines (gradient.py): H hidden units, LISTED (states that were reached are in a list; else all are), TILE (32 or 64),
// DEPTH (32), STAGES of copies in flight.

#define SMALL (TILE == 32)  // then registers hold the inputs, loaded during the wait
#define THREADS (SMALL ? 128 : 256)
#define ACROSS (SMALL ? 2 : 4)  // warps along the inputs, and two along the states
// No bank conflicts in shared memory: lines of small blocks, read two numbers per lane, are permuted; others are padded.
#define STRIDE (SMALL ? DEPTH : DEPTH + 4)
#define TURNED(line, k) (SMALL ? (k) ^ (line) % 4 * 8 : (k))
#define ROWS (TILE / 32)    // of 16 states, per warp
#define COLUMNS (TILE / ACROSS / 8)  // of 8 inputs, per warp
#define COPIES (TILE * DEPTH / 4 / THREADS)

extern "C" __global__ void __launch_bounds__(THREADS, SMALL ? 1 : 4) backward(
    float* d_inputs, float* d_table,  // [S, rows, H]; added to: [S, table_rows, width]
    const float* d_outputs, const float* inputs, const float* weight,  // [S, rows, given], [S, rows, H], [S, H + width, outputs]
    const int* entries, const int* list, const int* counts,  // [S, rows] table rows of late states; late states reached, [S]
    int rows, int early_states, int table_rows, int width, int outputs, int given) {  // min(given, outputs) columns count
    extern __shared__ float memory[];
    const int s = blockIdx.z, tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    const int many = LISTED ? early_states + counts[s] : rows, column = blockIdx.y * TILE;
    auto state = [&](int i) { return i >= many ? -1 : !LISTED || i < early_states ? i : list[(i64)s * (rows - early_states) + i - early_states]; };
    const int k4 = tid % (DEPTH / 4) * 4, line = tid / (DEPTH / 4);  // this thread copies four outputs per line
    constexpr int LINES = THREADS / (DEPTH / 4);
    const int spot = line * STRIDE + TURNED(line, k4);
    const bool even = outputs % 4 == 0;
    const int chunks = (min(given, outputs) + DEPTH - 1) / DEPTH;
    const int m0 = warp / ACROSS * (TILE / 2), n0 = warp % ACROSS * (TILE / ACROSS);  // of this warp
    auto two = [&](const float* lines, int k) {  // this lane's two of every eight outputs
        const float* from = lines + lane / 4 * STRIDE;
        return SMALL ? *(const float2*)(from + TURNED(lane / 4, k * 8 + lane % 4 * 2))
                     : make_float2(from[k * 8 + lane % 4], from[k * 8 + lane % 4 + 4]);
    };
#define INPUT(j) (column + n0 + (j)*8 + lane % 4 * 2)

    int row = blockIdx.x * TILE;
    if (row >= many) return;
    do {
        const float* from[COPIES];
#pragma unroll
        for (int q = 0; q < COPIES; ++q) {
            const int found = state(row + line + q * LINES);
            from[q] = found < 0 ? nullptr : d_outputs + ((i64)s * rows + found) * given;
        }
        auto copy = [&](int chunk, int stage) {
            float* a = memory + stage * 2 * TILE * STRIDE;
            float* b = a + TILE * STRIDE;
            const int k = chunk * DEPTH + k4;
#pragma unroll
            for (int q = 0; q < COPIES; ++q) {
                const int n = column + line + q * LINES;
                const bool there = from[q] && k < given;
                copy_async<16>(a + spot + q * LINES * STRIDE, there ? from[q] + k : d_outputs, there);
                const float* w = weight + ((i64)s * (H + width) + (n < H + width ? n : 0)) * outputs;
                float* to = b + spot + q * LINES * STRIDE;
                if (even)
                    copy_async<16>(to, w + (k < outputs ? k : 0), n < H + width && k < outputs);
                else
#pragma unroll
                    for (int i = 0; i < 4; ++i) copy_async<4>(to + i, w + (k + i < outputs ? k + i : 0), n < H + width && k + i < outputs);
            }
        };
        for (int c = 0; c < STAGES - 1; ++c) {
            if (c < chunks) copy(c, c);
            asm volatile("cp.async.commit_group;");
        }
        int found[ROWS][2];  // states whose results this thread ends up with
        float2 x[ROWS][2][COLUMNS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                found[i][half] = state(row + m0 + lane / 4 + i * 16 + half * 8);
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j)
                    if (SMALL && found[i][half] >= 0 && INPUT(j) < H) x[i][half][j] = *(const float2*)(inputs + ((i64)s * rows + found[i][half]) * H + INPUT(j));
            }
        float sum[ROWS][COLUMNS][4] = {}, fine[ROWS][COLUMNS][4] = {};
        for (int c = 0; c < chunks; ++c) {
            asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2));
            __syncthreads();
            if (c + STAGES - 1 < chunks) copy(c + STAGES - 1, (c + STAGES - 1) % STAGES);
            asm volatile("cp.async.commit_group;");
            const float* a = memory + c % STAGES * 2 * TILE * STRIDE;
            const float* b = a + TILE * STRIDE;
#pragma unroll
            for (int k = 0; k < DEPTH / 8; ++k) {
                u32 a_lead[ROWS][4], a_trail[ROWS][4], b_lead[COLUMNS][2], b_trail[COLUMNS][2];
#pragma unroll
                for (int i = 0; i < ROWS * 2; ++i) {
                    const float2 of = two(a + (m0 + i * 8) * STRIDE, k);
                    split(of.x, a_lead[i / 2][i % 2], a_trail[i / 2][i % 2]);
                    split(of.y, a_lead[i / 2][i % 2 + 2], a_trail[i / 2][i % 2 + 2]);
                }
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j) {
                    const float2 of = two(b + (n0 + j * 8) * STRIDE, k);
                    split(of.x, b_lead[j][0], b_trail[j][0]);
                    split(of.y, b_lead[j][1], b_trail[j][1]);
                }
#pragma unroll
                for (int product = 0; product < 3; ++product)  // in an order without dependent neighbours
#pragma unroll
                    for (int i = 0; i < ROWS; ++i)
#pragma unroll
                        for (int j = 0; j < COLUMNS; ++j)
                            multiply(product == 1 && SMALL ? fine[i][j] : sum[i][j], product ? a_lead[i] : a_trail[i], product == 1 ? b_trail[j] : b_lead[j]);
            }
        }
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (found[i][half] < 0) continue;
                const i64 at = (i64)s * rows + found[i][half];
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j) {
                    const int n = INPUT(j);
                    const float first = sum[i][j][half * 2] + fine[i][j][half * 2], second = sum[i][j][half * 2 + 1] + fine[i][j][half * 2 + 1];
                    if (n < H) {
                        const float2 over = SMALL ? x[i][half][j] : *(const float2*)(inputs + at * H + n);
                        *(float2*)(d_inputs + at * H + n) = make_float2(over.x > 0 ? first : 0.f, over.y > 0 ? second : 0.f);
                    } else if (n < H + width) {  // an early state's number is its row of the table
                        const i64 entry = (i64)s * table_rows + (found[i][half] < early_states ? found[i][half] : entries[at]);
                        atomicAdd(d_table + entry * width + n - H, first);
                        atomicAdd(d_table + entry * width + n - H + 1, second);
                    }
                }
            }
        row += gridDim.x * TILE;
        if (LISTED) __syncthreads();  // before shared memory is overwritten
    } while (LISTED && row < many);  // else there is a block for each tile
}
