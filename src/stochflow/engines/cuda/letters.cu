// What the loss says to the first layer of a string policy over a large alphabet: a letter's row of weights is in the sum from the step after
// it was written on, so it is given all that is said from there on. Added, atomically, to zeros.
//
// A thread a hidden unit; a block of threads takes every gridDim.x-th trajectory. Defined by the host (balance_kernel.py): H hidden units, D
// places of SIZE letters each, FEATURES of them together.

extern "C" __global__ void __launch_bounds__(H) letters(
    float* to_first, float* to_first_bias,
    const i64* last, const int* reached,  // [S, B, D] the finished strings, [S, B] how many states each was in
    const float* to_sums, int batch, int rows) {
    const int s = blockIdx.y, h = threadIdx.x;
    float all = 0.f;
    for (int b = blockIdx.x; b < batch; b += gridDim.x) {
        float total = 0.f;
#pragma unroll 4
        for (int t = reached[s * batch + b] - 1; t > 0; --t) {
            total += to_sums[((i64)s * rows + (i64)t * batch + b) * H + h];
            const i64 f = (t - 1) * SIZE + last[((i64)s * batch + b) * D + t - 1];
            atomicAdd(to_first + ((i64)s * FEATURES + f) * H + h, total);
        }
        all += total + to_sums[((i64)s * rows + b) * H + h];
    }
    atomicAdd(to_first_bias + s * H + h, all);
}
