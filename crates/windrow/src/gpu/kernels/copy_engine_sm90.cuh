// Hopper's Tensor Memory Accelerator (TMA): copies between global and shared memory without registers, in units of 16
// bytes, and the transaction barriers that say when the bytes have arrived. Names and operands follow the PTX ISA.
#pragma once

__device__ __forceinline__ unsigned shared_address(const void *p) {
    return (unsigned)__cvta_generic_to_shared(p);
}

// Barriers of one arrival a phase, in a block's shared memory. One thread calls it, before all threads
// of the block meet.
template <int N> __device__ __forceinline__ void barriers_init(const unsigned long long (&barriers)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barriers + i)));
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// The phase's arrival. The phase ends when this many bytes have arrived too.
__device__ __forceinline__ void barrier_expect(unsigned barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

// Waits until the phase of this parity has ended.
__device__ __forceinline__ void barrier_wait(unsigned barrier, unsigned parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void copy_in(unsigned to, const void *from, unsigned bytes, unsigned barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// What the thread has written to shared memory can be seen by copies that start after it.
__device__ __forceinline__ void copy_out_fence() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The copies of one call are a group.
__device__ __forceinline__ void copy_out(void *to, unsigned from, unsigned bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
                 "cp.async.bulk.commit_group;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}

// Waits until the shared memory of all copies that this thread has started may be written again.
__device__ __forceinline__ void copy_out_wait() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
