//! Names of the kernels in the embedded code.
//!
//! Kernels are C++ templates, so these are the names that the C++ ABI gives their instances. The build
//! reads this file too, and fails when one of them is not in the code.

/// Every kernel that this crate launches.
pub const ENTRIES: [&str; 20] = [
    DISPATCH_TUNED_FP8,
    DISPATCH_TUNED_BF16,
    DISPATCH_FP8,
    DISPATCH_BF16,
    COMBINE_TUNED,
    COMBINE,
    EXPERT_RECV,
    SEND_TUNED_FP8,
    SEND_TUNED_BF16,
    SEND_FP8,
    SEND_BF16,
    ECHO_TUNED_FP8,
    ECHO_TUNED_BF16,
    ECHO_FP8,
    ECHO_BF16,
    GATHER_FP8,
    GATHER_BF16,
    GATE_UP,
    DOWN,
    FLAG_ADD,
];

/// The kernel that adds to a flag in stream order.
pub const FLAG_ADD: &str = "sy_flag_add";

pub const DISPATCH_TUNED_FP8: &str = "_ZN10switchyard5impls15dispatch_kernelINS0_14DispatchConfigILj7168ELj8ELb1ELj448EEEEEv18sy_dispatch_params";
pub const DISPATCH_TUNED_BF16: &str = "_ZN10switchyard5impls15dispatch_kernelINS0_14DispatchConfigILj7168ELj8ELb0ELj448EEEEEv18sy_dispatch_params";
pub const DISPATCH_FP8: &str = "_ZN10switchyard5impls15dispatch_kernelINS0_14DispatchConfigILj0ELj0ELb1ELj256EEEEEv18sy_dispatch_params";
pub const DISPATCH_BF16: &str = "_ZN10switchyard5impls15dispatch_kernelINS0_14DispatchConfigILj0ELj0ELb0ELj256EEEEEv18sy_dispatch_params";
pub const COMBINE_TUNED: &str = "_ZN10switchyard5impls14combine_kernelINS0_13CombineConfigILj7168ELj448EEEEEv17sy_combine_params";
pub const COMBINE: &str =
    "_ZN10switchyard5impls14combine_kernelINS0_13CombineConfigILj0ELj256EEEEEv17sy_combine_params";
pub const EXPERT_RECV: &str = "_ZN10switchyard5impls18expert_recv_kernelE21sy_expert_recv_params";
pub const SEND_TUNED_FP8: &str = "_ZN10switchyard5impls18expert_send_kernelINS0_12AnswerConfigILj7168ELb1ELj448EEEEEv21sy_expert_send_params";
pub const SEND_TUNED_BF16: &str = "_ZN10switchyard5impls18expert_send_kernelINS0_12AnswerConfigILj7168ELb0ELj448EEEEEv21sy_expert_send_params";
pub const SEND_FP8: &str = "_ZN10switchyard5impls18expert_send_kernelINS0_12AnswerConfigILj0ELb1ELj256EEEEEv21sy_expert_send_params";
pub const SEND_BF16: &str = "_ZN10switchyard5impls18expert_send_kernelINS0_12AnswerConfigILj0ELb0ELj256EEEEEv21sy_expert_send_params";
pub const ECHO_TUNED_FP8: &str =
    "_ZN10switchyard5impls11echo_kernelINS0_12AnswerConfigILj7168ELb1ELj448EEEEEv14sy_echo_params";
pub const ECHO_TUNED_BF16: &str =
    "_ZN10switchyard5impls11echo_kernelINS0_12AnswerConfigILj7168ELb0ELj448EEEEEv14sy_echo_params";
pub const ECHO_FP8: &str =
    "_ZN10switchyard5impls11echo_kernelINS0_12AnswerConfigILj0ELb1ELj256EEEEEv14sy_echo_params";
pub const ECHO_BF16: &str =
    "_ZN10switchyard5impls11echo_kernelINS0_12AnswerConfigILj0ELb0ELj256EEEEEv14sy_echo_params";
pub const GATHER_FP8: &str =
    "_ZN10switchyard5impls20expert_gather_kernelILb1EEEv24sy_expert_compute_params";
pub const GATHER_BF16: &str =
    "_ZN10switchyard5impls20expert_gather_kernelILb0EEEv24sy_expert_compute_params";
pub const GATE_UP: &str =
    "_ZN10switchyard5impls18expert_gemm_kernelILb1EEEv24sy_expert_compute_params";
pub const DOWN: &str =
    "_ZN10switchyard5impls18expert_gemm_kernelILb0EEEv24sy_expert_compute_params";
