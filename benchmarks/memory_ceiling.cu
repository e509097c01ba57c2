// What the memory system gives at best: every block moves UNROLL x 16 bytes per thread. WRITE: in-place read-modify-write,
// otherwise read and reduce (the comparison keeps the loads alive and never holds).
extern "C" __global__ void __launch_bounds__(THREADS) memory_ceiling(const float4* data, float4* output) {
    const long long first = (long long)blockIdx.x * (THREADS * UNROLL) + threadIdx.x;
    float4 v[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; i++) v[i] = data[first + i * THREADS];
#if WRITE
#pragma unroll
    for (int i = 0; i < UNROLL; i++) {
        v[i].x *= 0.9999f, v[i].y *= 0.9999f, v[i].z *= 0.9999f, v[i].w *= 0.9999f;
        output[first + i * THREADS] = v[i];
    }
#else
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < UNROLL; i++) sum += v[i].x + v[i].y + v[i].z + v[i].w;
    if (sum == 1.2345e-30f) output[threadIdx.x].x = sum;
#endif
}
