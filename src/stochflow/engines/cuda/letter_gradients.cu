// Gradient of the first layer for long alphabets: a letter's row of weights is in the first layer's sum from the step after
// it was written on, so its gradient is the sum of those of all later states. Added atomically to zeros.
//
// A thread per hidden unit; a block of threads takes every gridDim.x-th trajectory. Defines (gradient.py): H hidden units,
// D columns of SIZE letters each, FEATURES together.

extern "C" __global__ void __launch_bounds__(H) letter_gradients(
    float* d_first, float* d_first_bias,
    const i64* last, const int* reached,  // [S, B, D] last states, [S, B] states of each trajectory
    const float* d_sums, int batch, int rows) {
    const int s = blockIdx.y, h = threadIdx.x;
    float all = 0.f;
    for (int b = blockIdx.x; b < batch; b += gridDim.x) {
        float total = 0.f;
#pragma unroll 4
        for (int t = reached[s * batch + b] - 1; t > 0; --t) {
            total += d_sums[((i64)s * rows + (i64)t * batch + b) * H + h];
            const i64 f = (t - 1) * SIZE + last[((i64)s * batch + b) * D + t - 1];
            atomicAdd(d_first + ((i64)s * FEATURES + f) * H + h, total);
        }
        all += total + d_sums[((i64)s * rows + b) * H + h];
    }
    atomicAdd(d_first_bias + s * H + h, all);
}
