// An update of a block of parameters: `squares` sums the gradient's squares, `update` clips each seed's gradient, takes Adam's step and moves the
// averages. A block of threads takes a span: [n, 3] of the first number, the last + 1 and the seed.
//
// Defined by the host (adam_kernel.py): THREADS, FOLLOWS (there is a follower).

__device__ __forceinline__ float whole(float value) {
    __shared__ float of_warps[THREADS / 32];
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
    __syncthreads();
    value = 0.f;
#pragma unroll
    for (int w = 0; w < THREADS / 32; ++w) value += of_warps[w];
    return value;
}

// One block more than there are spans: the last works out what every block of `update` needs to know.
extern "C" __global__ void __launch_bounds__(THREADS) squares(
    float* parts, float* paces, float* count,  // [n] sums; [3]; steps of Adam
    const float* gradient, const int* summed, const double* step, double rate, double tau, double decay, double recent, double log_beta1,
    double log_beta2) {
    if (blockIdx.x == gridDim.x - 1) {
        if (threadIdx.x == 0) {
            const float now = (float)*step, taken = *count += 1.f;
            paces[0] = (float)rate * expf(-(float)decay * log1pf(now / (float)tau)) / -expm1f(taken * (float)log_beta1);
            paces[1] = sqrtf(-expm1f(taken * (float)log_beta2));
            paces[2] = 1.f / (1.f + now / (float)recent);
        }
        return;
    }
    const int first = summed[3 * blockIdx.x], last = summed[3 * blockIdx.x + 1];
    float total = 0.f;
#pragma unroll 4
    for (int i = first + threadIdx.x; i < last; i += THREADS) total += gradient[i] * gradient[i];
    total = whole(total);
    if (threadIdx.x == 0) parts[blockIdx.x] = total;
}

extern "C" __global__ void __launch_bounds__(THREADS) update(
    float* values, float* mean, float* square, float* average, float* follower, float* norms,  // changed in place; norms [S] are written
    const float* gradient, const float* parts, const float* paces, const int* updated, int num_parts, double clip,
    double follow, double beta1, double beta2, double eps) {
    const int first = updated[3 * blockIdx.x], last = updated[3 * blockIdx.x + 1], seed = updated[3 * blockIdx.x + 2];
    const float rate = paces[0], root = paces[1], weight = paces[2];
    // numbers are on their way while the norm is added up
    float g[4], m[4], v[4], x[4], a[4], f[4];
    auto load = [&](int start) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int i = start + k * THREADS;
            if (i >= last) continue;
            g[k] = gradient[i], m[k] = mean[i], v[k] = square[i], x[k] = values[i], a[k] = average[i];
            if (FOLLOWS) f[k] = follower[i];
        }
    };
    load(first + threadIdx.x);
    float total = 0.f;
#pragma unroll 4
    for (int i = threadIdx.x; i < num_parts; i += THREADS) total += parts[seed * num_parts + i];  // of each seed as many, in a row
    const float norm = sqrtf(whole(total));
    if (threadIdx.x == 0) norms[seed] = norm;  // by all of a seed's blocks, the same
    const float scale = fminf((float)clip / fmaxf(norm, 1e-12f), 1.f);
    const float one = (float)(1 - beta1), kept = (float)beta2, two = (float)(1 - beta2), small = (float)eps, followed = (float)follow;
    for (int start = first + threadIdx.x; start < last; start += 4 * THREADS) {
        if (start >= first + 4 * THREADS) load(start);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int i = start + k * THREADS;
            if (i >= last) continue;
            const float slope = g[k] * scale;
            m[k] += one * (slope - m[k]);
            v[k] = kept * v[k] + two * slope * slope;
            x[k] -= rate * m[k] / (sqrtf(v[k]) / root + small);
            mean[i] = m[k], square[i] = v[k], values[i] = x[k];
            average[i] = a[k] + weight * (x[k] - a[k]);
            if (FOLLOWS) follower[i] = f[k] + followed * (x[k] - f[k]);
        }
    }
}
