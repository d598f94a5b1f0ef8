// What the kernels share: short names of types, asynchronous copies to shared memory, sums over the lanes of a warp, and
// products of float32 matrices on tensor cores. A product is three of TF32, of the leading and the trailing bits of both
// factors; the product of both trailing parts, some 2^-21 of the whole, is left out.
//
// In all files s is a seed, b a trajectory, t a step, m a move, h a hidden unit, and d_x the gradient of the loss with
// respect to x. A world either appends (a move writes its letter into the next column) or is a lattice (a move raises its
// own coordinate by one): engines/lower.py has the rules.

typedef long long i64;
typedef unsigned int u32;

// Copies BYTES to shared memory without waiting for them; zeros unless `there`.
template <int BYTES>
__device__ __forceinline__ void copy_async(float* to, const float* from, bool there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from), "n"(BYTES),
                 "r"(there ? BYTES : 0));
}

__device__ __forceinline__ void multiply(float* sum, const u32* a, const u32* b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// TF32 has eleven significant bits, and products ignore the others: those become a number of their own.
__device__ __forceinline__ void split(float value, u32& leading, u32& trailing) {
    leading = __float_as_uint(value);
    trailing = __float_as_uint(value - __uint_as_float(leading & 0xffffe000u));
}

// Adds up V sums over lanes that differ in the bits of 2 * O - 1; each lane is left with its share of them, in front.
template <int V, int O>
__device__ __forceinline__ void gather(float* sum, int lane) {
    if constexpr (O > 0 && V > 1) {
        const bool upper = lane & O;
#pragma unroll
        for (int i = 0; i < V / 2; ++i) {
            const float other = __shfl_xor_sync(~0u, upper ? sum[i] : sum[i + V / 2], O);
            sum[i] = (upper ? sum[i + V / 2] : sum[i]) + other;
        }
        gather<V / 2, O / 2>(sum, lane);
    } else if constexpr (O > 0) {
        sum[0] += __shfl_xor_sync(~0u, sum[0], O);
        gather<1, O / 2>(sum, lane);
    }
}

// Which of the V sums comes first among those that `gather` leaves to this lane.
template <int V, int O>
__device__ __forceinline__ int gathered(int lane) {
    if constexpr (O > 0 && V > 1)
        return (lane & O ? V / 2 : 0) + gathered<V / 2, O / 2>(lane);
    else
        return 0;
}
