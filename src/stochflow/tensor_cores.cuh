// What the kernels have in common: names, copies to shared memory, and products of float32 matrices on tensor cores, as three of TF32, of the
// leading and the trailing bits of both factors. What they leave out is the product of both trailing parts, some 2^-21 of the whole.

typedef long long i64;
typedef unsigned int u32;

// BYTES to shared memory, without waiting for them; or zeros.
template <int BYTES>
__device__ __forceinline__ void ahead(float* to, const float* from, bool there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from), "n"(BYTES),
                 "r"(there ? BYTES : 0));
}

__device__ __forceinline__ void multiply(float* sum, const u32* a, const u32* b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// TF32 has eleven significant bits; what it leaves out is a number of its own.
__device__ __forceinline__ void split(float value, u32& leading, u32& trailing) {
    leading = __float_as_uint(value) & 0xffffe000u;
    trailing = __float_as_uint(value - __uint_as_float(leading)) & 0xffffe000u;
}
