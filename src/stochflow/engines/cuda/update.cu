// An update of a block of parameters: `squares` sums the squares of the gradient, `update` clips each seed's gradient, takes
// Adam's step and moves the averages. A block of threads takes a span: [n, 3] of the first number, the last + 1, the seed.
//
// Defines (update.py): THREADS, FOLLOWS (there is a follower).

// Whether a span may be read and written four numbers at a time.
#define WIDE(first, last) ((first) % 4 == 0 && (last) % 4 == 0)

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

// One block more than there are spans: the last computes the rates that every block of `update` needs.
extern "C" __global__ void __launch_bounds__(THREADS) squares(
    float* parts, float* rates, float* adam_step,  // [n] sums of squares; [3]; Adam's step count
    const float* gradient, const int* summed, const double* step, double rate, double tau, double decay, double recent, double log_beta1,
    double log_beta2) {
    if (blockIdx.x == gridDim.x - 1) {
        if (threadIdx.x == 0) {
            const float now = (float)*step, taken = *adam_step += 1.f;
            rates[0] = (float)rate * expf(-(float)decay * log1pf(now / (float)tau)) / -expm1f(taken * (float)log_beta1);
            rates[1] = 1.f / sqrtf(-expm1f(taken * (float)log_beta2));
            rates[2] = 1.f / (1.f + now / (float)recent);
        }
        return;
    }
    const int first = summed[3 * blockIdx.x], last = summed[3 * blockIdx.x + 1];
    float total = 0.f;
    if (WIDE(first, last)) {
#pragma unroll 8
        for (int i = first + threadIdx.x * 4; i < last; i += THREADS * 4) {
            const float4 g = *(const float4*)(gradient + i);
            total += g.x * g.x + g.y * g.y + g.z * g.z + g.w * g.w;
        }
    } else {
#pragma unroll 4
        for (int i = first + threadIdx.x; i < last; i += THREADS) total += gradient[i] * gradient[i];
    }
    total = whole(total);
    if (threadIdx.x == 0) parts[blockIdx.x] = total;
}

// A thread's four of every 4 * THREADS numbers: neighbours, or THREADS apart.
template <bool IN_A_ROW>
__device__ __forceinline__ void read(float* to, const float* from, int i, int last) {
    if (IN_A_ROW) {
        if (i < last) *(float4*)to = *(const float4*)(from + i);
    } else {
#pragma unroll
        for (int k = 0; k < 4; ++k)
            if (i + k * THREADS < last) to[k] = from[i + k * THREADS];
    }
}
template <bool IN_A_ROW>
__device__ __forceinline__ void write(float* to, const float* from, int i, int last) {
    if (IN_A_ROW) {
        if (i < last) *(float4*)(to + i) = *(const float4*)from;
    } else {
#pragma unroll
        for (int k = 0; k < 4; ++k)
            if (i + k * THREADS < last) to[i + k * THREADS] = from[k];
    }
}

struct alignas(16) Four {
    float of[4];
};

struct Parameters {
    float *values, *mean, *square, *average, *follower;
    const float* gradient;
};

struct Adam {
    float rate, inverse, weight, follow, one, kept, two, eps;
};

// `scale` synchronises the block; the first loads are in flight meanwhile.
template <bool IN_A_ROW, typename Scale>
__device__ __forceinline__ void take(const Parameters& p, const Adam& adam, int first, int last, Scale scale) {
    Four g, m, v, x, a, f;
    auto load = [&](int i) {
        read<IN_A_ROW>(g.of, p.gradient, i, last);
        read<IN_A_ROW>(m.of, p.mean, i, last);
        read<IN_A_ROW>(v.of, p.square, i, last);
        read<IN_A_ROW>(x.of, p.values, i, last);
        read<IN_A_ROW>(a.of, p.average, i, last);
        if (FOLLOWS) read<IN_A_ROW>(f.of, p.follower, i, last);
    };
    const int begin = first + threadIdx.x * (IN_A_ROW ? 4 : 1);
    load(begin);
    const float clipped = scale();
    for (int i = begin; i < last; i += 4 * THREADS) {
        if (i != begin) load(i);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const float scaled = g.of[k] * clipped;
            m.of[k] += adam.one * (scaled - m.of[k]);
            v.of[k] = adam.kept * v.of[k] + adam.two * scaled * scaled;
            float root;
            asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(v.of[k]));  // accurate to a bit or two, as the division is
            x.of[k] -= __fdividef(adam.rate * m.of[k], root * adam.inverse + adam.eps);
            a.of[k] += adam.weight * (x.of[k] - a.of[k]);
            if (FOLLOWS) f.of[k] += adam.follow * (x.of[k] - f.of[k]);
        }
        write<IN_A_ROW>(p.mean, m.of, i, last);
        write<IN_A_ROW>(p.square, v.of, i, last);
        write<IN_A_ROW>(p.values, x.of, i, last);
        write<IN_A_ROW>(p.average, a.of, i, last);
        if (FOLLOWS) write<IN_A_ROW>(p.follower, f.of, i, last);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) update(
    // changed in place; norms [S] are written
    float* values, float* mean, float* square, float* average, float* follower, float* norms, double* step,
    const float* gradient, const float* parts, const float* rates, const int* updated, int num_parts, int ends, double clip,
    double follow, double beta1, double beta2, double eps) {
    if (ends && blockIdx.x == 0 && threadIdx.x == 0) *step += 1;  // `squares` has read it
    const int first = updated[3 * blockIdx.x], last = updated[3 * blockIdx.x + 1], seed = updated[3 * blockIdx.x + 2];
    const Adam adam = {rates[0], rates[1], rates[2], (float)follow, (float)(1 - beta1), (float)beta2, (float)(1 - beta2), (float)eps};
    const Parameters parameters = {values, mean, square, average, follower, gradient};
    auto scale = [&] {
        float total = 0.f;
#pragma unroll 4
        for (int i = threadIdx.x; i < num_parts; i += THREADS) total += parts[seed * num_parts + i];
        const float norm = sqrtf(whole(total));
        if (threadIdx.x == 0) norms[seed] = norm;  // the same from all blocks of a seed
        return fminf((float)clip / fmaxf(norm, 1e-12f), 1.f);
    };
    if (WIDE(first, last))
        take<true>(parameters, adam, first, last, scale);
    else
        take<false>(parameters, adam, first, last, scale);
}
