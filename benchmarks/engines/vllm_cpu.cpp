// What `serving.py --cpu --vllm LIBRARY` calls: the operators of vLLM's own kernels for the CPU, from a checkout beside it:
//
//     INCLUDE=$(python -c "import torch; print(torch.__path__[0])")
//     g++ -shared -fPIC -std=c++20 -O3 -fopenmp -march=sapphirerapids -DCPU_CAPABILITY_AVX512 -DCPU_CAPABILITY=AVX512 \
//         -include ATen/cpu/vec/vec.h -I CHECKOUT/csrc -I CHECKOUT/csrc/cpu -I CHECKOUT/csrc/cpu/sgl-kernels \
//         -I $INCLUDE/include -I $INCLUDE/include/torch/csrc/api/include vllm_cpu.cpp \
//         CHECKOUT/csrc/cpu/sgl-kernels/conv.cpp CHECKOUT/csrc/cpu/mamba_cpu.cpp -L $INCLUDE/lib -ltorch_cpu -lc10 -o LIBRARY
//
// SGLang's kernels for the CPU are the same (`sgl-kernels`). Declared as in csrc/cpu/torch_bindings.cpp.
#include <ATen/ATen.h>
#include <torch/library.h>

using at::Tensor;
using std::optional;

Tensor causal_conv1d_weight_pack(const Tensor &weight);
Tensor causal_conv1d_fwd_cpu(const Tensor &x, const Tensor &weight, const optional<Tensor> &bias,
                             const optional<Tensor> &conv_states, const optional<Tensor> &query_start_loc,
                             const optional<Tensor> &conv_state_indices, const optional<Tensor> &has_initial_state,
                             bool silu, int64_t pad_slot_id, bool is_packed);
Tensor causal_conv1d_update_cpu(const Tensor &x, const Tensor &conv_states, const Tensor &weight,
                                const optional<Tensor> &bias, bool silu, const optional<Tensor> &num_accepted_tokens,
                                const optional<Tensor> &conv_state_indices, int64_t pad_slot_id, bool is_packed);
Tensor causal_conv1d_update_cpu_impl(Tensor &x, Tensor &conv_state, const Tensor &weight, const optional<Tensor> &bias,
                                     const optional<std::string> &activation, const optional<Tensor> &conv_state_indices,
                                     const optional<Tensor> &query_start_loc, int64_t pad_slot_id);

TORCH_LIBRARY(vllm_cpu, ops) {
    ops.def("causal_conv1d_weight_pack(Tensor weight) -> Tensor");
    ops.def("causal_conv1d_fwd_cpu(Tensor x, Tensor weight, Tensor? bias, Tensor? conv_states, Tensor? starts, Tensor? indices,"
            "Tensor? has_initial_state, bool silu, int pad_slot_id, bool is_packed) -> Tensor");
    ops.def("causal_conv1d_update_cpu(Tensor x, Tensor(a!) conv_states, Tensor weight, Tensor? bias, bool silu, Tensor? accepted,"
            "Tensor? indices, int pad_slot_id, bool is_packed) -> Tensor");
    ops.def("causal_conv1d_update_cpu_vec(Tensor(a!) x, Tensor(b!) conv_state, Tensor weight, Tensor? bias, str? activation,"
            "Tensor? indices, Tensor? starts, int pad_slot_id) -> Tensor");
}

TORCH_LIBRARY_IMPL(vllm_cpu, CPU, ops) {
    ops.impl("causal_conv1d_weight_pack", &causal_conv1d_weight_pack);
    ops.impl("causal_conv1d_fwd_cpu", &causal_conv1d_fwd_cpu);
    ops.impl("causal_conv1d_update_cpu", &causal_conv1d_update_cpu);
    ops.impl("causal_conv1d_update_cpu_vec", &causal_conv1d_update_cpu_impl);
}
