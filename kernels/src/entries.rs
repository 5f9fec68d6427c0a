//! Names of the kernels in the embedded code.
//!
//! Kernels are C++ templates, so these are the names that the C++ ABI gives their instances. The build
//! reads this file too, and fails when one of them is not in the code.

/// Every kernel that this crate launches.
pub const ENTRIES: [&str; 48] = [
    P2P_PINGPONG,
    P2P_STREAM,
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
    GATHER_FP8_TO_BF16,
    GATHER_BF16_TO_FP8,
    GATE_UP_DIRECT_FP8,
    GATE_UP_DIRECT_BF16,
    GATE_UP_FP8,
    GATE_UP_BF16,
    DOWN_FP8,
    DOWN_BF16,
    FLAG_ADD,
    TELL_HOST,
    CONVERT,
    CHECKSUM,
    PROXY_PRODUCE,
    PEER_COPY,
    LINK_CALLS,
    COMBINE_TUNED_FEW,
    DISPATCH_TUNED_FP8_ANY,
    DISPATCH_TUNED_BF16_ANY,
    DISPATCH_FP8_ANY,
    DISPATCH_BF16_ANY,
    COMBINE_TUNED_ANY,
    COMBINE_ANY,
    EXPERT_RECV_ANY,
    SEND_TUNED_FP8_ANY,
    SEND_TUNED_BF16_ANY,
    SEND_FP8_ANY,
    SEND_BF16_ANY,
    ECHO_TUNED_FP8_ANY,
    ECHO_TUNED_BF16_ANY,
    ECHO_FP8_ANY,
    ECHO_BF16_ANY,
];

/// Kernels of the expert stage that multiply, and need more shared memory than others.
pub const PRODUCTS: [&str; 6] =
    [GATE_UP_DIRECT_FP8, GATE_UP_DIRECT_BF16, GATE_UP_FP8, GATE_UP_BF16, DOWN_FP8, DOWN_BF16];

/// The kernel that adds to a flag in stream order.
pub const FLAG_ADD: &str = "sy_flag_add";
/// The kernel that sends small messages to the host in stream order.
pub const TELL_HOST: &str = "sy_tell_host";
/// The kernel that converts matrices of a caller in stream order.
pub const CONVERT: &str = "sy_convert";
/// The kernel that computes checksums of device memory.
pub const CHECKSUM: &str = "sy_checksum";
/// The producer of commands for measurements of the proxy.
pub const PROXY_PRODUCE: &str = "sy_proxy_produce";
/// The copy that a relay forwards with.
pub const PEER_COPY: &str = "sy_peer_copy";
/// The calls of a link, for tests.
pub const LINK_CALLS: &str = "sy_link_calls";

pub const DISPATCH_TUNED_FP8: &str = "_ZN10switchyard5impls15dispatch_kernelINS0_14DispatchConfigILj7168ELj8ELb1ELj448ELj2EEEEEv18sy_dispatch_params";
pub const DISPATCH_TUNED_BF16: &str = "_ZN10switchyard5impls15dispatch_kernelINS0_14DispatchConfigILj7168ELj8ELb0ELj448ELj2EEEEEv18sy_dispatch_params";
pub const DISPATCH_FP8: &str = "_ZN10switchyard5impls15dispatch_kernelINS0_14DispatchConfigILj0ELj0ELb1ELj256ELj2EEEEEv18sy_dispatch_params";
pub const DISPATCH_BF16: &str = "_ZN10switchyard5impls15dispatch_kernelINS0_14DispatchConfigILj0ELj0ELb0ELj256ELj2EEEEEv18sy_dispatch_params";
pub const COMBINE_TUNED: &str = "_ZN10switchyard5impls14combine_kernelINS0_13CombineConfigILj7168ELj448ELj2EEEEEv17sy_combine_params";
pub const COMBINE: &str = "_ZN10switchyard5impls14combine_kernelINS0_13CombineConfigILj0ELj256ELj2EEEEEv17sy_combine_params";
pub const P2P_PINGPONG: &str = "_ZN10switchyard5impls15pingpong_kernelE13sy_p2p_params";
pub const P2P_STREAM: &str = "_ZN10switchyard5impls13stream_kernelE13sy_p2p_params";
pub const EXPERT_RECV: &str =
    "_ZN10switchyard5impls18expert_recv_kernelILj2EEEv21sy_expert_recv_params";
pub const SEND_TUNED_FP8: &str = "_ZN10switchyard5impls18expert_send_kernelINS0_12AnswerConfigILj7168ELb1ELj448ELj2EEEEEv21sy_expert_send_params";
pub const SEND_TUNED_BF16: &str = "_ZN10switchyard5impls18expert_send_kernelINS0_12AnswerConfigILj7168ELb0ELj448ELj2EEEEEv21sy_expert_send_params";
pub const SEND_FP8: &str = "_ZN10switchyard5impls18expert_send_kernelINS0_12AnswerConfigILj0ELb1ELj256ELj2EEEEEv21sy_expert_send_params";
pub const SEND_BF16: &str = "_ZN10switchyard5impls18expert_send_kernelINS0_12AnswerConfigILj0ELb0ELj256ELj2EEEEEv21sy_expert_send_params";
pub const ECHO_TUNED_FP8: &str = "_ZN10switchyard5impls11echo_kernelINS0_12AnswerConfigILj7168ELb1ELj448ELj2EEEEEv14sy_echo_params";
pub const ECHO_TUNED_BF16: &str = "_ZN10switchyard5impls11echo_kernelINS0_12AnswerConfigILj7168ELb0ELj448ELj2EEEEEv14sy_echo_params";
pub const ECHO_FP8: &str =
    "_ZN10switchyard5impls11echo_kernelINS0_12AnswerConfigILj0ELb1ELj256ELj2EEEEEv14sy_echo_params";
pub const ECHO_BF16: &str =
    "_ZN10switchyard5impls11echo_kernelINS0_12AnswerConfigILj0ELb0ELj256ELj2EEEEEv14sy_echo_params";
pub const GATHER_FP8_TO_BF16: &str =
    "_ZN10switchyard5impls20expert_gather_kernelILb1EEEv24sy_expert_compute_params";
pub const GATHER_BF16_TO_FP8: &str =
    "_ZN10switchyard5impls20expert_gather_kernelILb0EEEv24sy_expert_compute_params";
pub const GATE_UP_DIRECT_FP8: &str =
    "_ZN10switchyard5impls18expert_gemm_kernelILb1ELb1ELb1EEEv24sy_expert_compute_params";
pub const GATE_UP_DIRECT_BF16: &str =
    "_ZN10switchyard5impls18expert_gemm_kernelILb0ELb1ELb1EEEv24sy_expert_compute_params";
pub const GATE_UP_FP8: &str =
    "_ZN10switchyard5impls18expert_gemm_kernelILb1ELb1ELb0EEEv24sy_expert_compute_params";
pub const GATE_UP_BF16: &str =
    "_ZN10switchyard5impls18expert_gemm_kernelILb0ELb1ELb0EEEv24sy_expert_compute_params";
pub const DOWN_FP8: &str =
    "_ZN10switchyard5impls18expert_gemm_kernelILb1ELb0ELb0EEEv24sy_expert_compute_params";
pub const DOWN_BF16: &str =
    "_ZN10switchyard5impls18expert_gemm_kernelILb0ELb0ELb0EEEv24sy_expert_compute_params";

/// [`COMBINE_TUNED`] for few blocks, which have many tokens each.
pub const COMBINE_TUNED_FEW: &str = "_ZN10switchyard5impls14combine_kernelINS0_9FewBlocksINS0_13CombineConfigILj7168ELj448ELj2EEEEEEEv17sy_combine_params";

/// The kernel that does the same over links of every path that is compiled in.
#[must_use]
pub fn any_path(entry: &'static str) -> &'static str {
    ANY_PATH.iter().find(|(direct, _)| *direct == entry).map_or(entry, |(_, any)| any)
}

const ANY_PATH: [(&str, &str); 15] = [
    (DISPATCH_TUNED_FP8, DISPATCH_TUNED_FP8_ANY),
    (DISPATCH_TUNED_BF16, DISPATCH_TUNED_BF16_ANY),
    (DISPATCH_FP8, DISPATCH_FP8_ANY),
    (DISPATCH_BF16, DISPATCH_BF16_ANY),
    (COMBINE_TUNED, COMBINE_TUNED_ANY),
    (COMBINE, COMBINE_ANY),
    (EXPERT_RECV, EXPERT_RECV_ANY),
    (SEND_TUNED_FP8, SEND_TUNED_FP8_ANY),
    (SEND_TUNED_BF16, SEND_TUNED_BF16_ANY),
    (SEND_FP8, SEND_FP8_ANY),
    (SEND_BF16, SEND_BF16_ANY),
    (ECHO_TUNED_FP8, ECHO_TUNED_FP8_ANY),
    (ECHO_TUNED_BF16, ECHO_TUNED_BF16_ANY),
    (ECHO_FP8, ECHO_FP8_ANY),
    (ECHO_BF16, ECHO_BF16_ANY),
];

pub const DISPATCH_TUNED_FP8_ANY: &str = "_ZN10switchyard5impls15dispatch_kernelINS0_14DispatchConfigILj7168ELj8ELb1ELj448ELj14EEEEEv18sy_dispatch_params";
pub const DISPATCH_TUNED_BF16_ANY: &str = "_ZN10switchyard5impls15dispatch_kernelINS0_14DispatchConfigILj7168ELj8ELb0ELj448ELj14EEEEEv18sy_dispatch_params";
pub const DISPATCH_FP8_ANY: &str = "_ZN10switchyard5impls15dispatch_kernelINS0_14DispatchConfigILj0ELj0ELb1ELj256ELj14EEEEEv18sy_dispatch_params";
pub const DISPATCH_BF16_ANY: &str = "_ZN10switchyard5impls15dispatch_kernelINS0_14DispatchConfigILj0ELj0ELb0ELj256ELj14EEEEEv18sy_dispatch_params";
pub const COMBINE_TUNED_ANY: &str = "_ZN10switchyard5impls14combine_kernelINS0_13CombineConfigILj7168ELj448ELj14EEEEEv17sy_combine_params";
pub const COMBINE_ANY: &str = "_ZN10switchyard5impls14combine_kernelINS0_13CombineConfigILj0ELj256ELj14EEEEEv17sy_combine_params";
pub const EXPERT_RECV_ANY: &str =
    "_ZN10switchyard5impls18expert_recv_kernelILj14EEEv21sy_expert_recv_params";
pub const SEND_TUNED_FP8_ANY: &str = "_ZN10switchyard5impls18expert_send_kernelINS0_12AnswerConfigILj7168ELb1ELj448ELj14EEEEEv21sy_expert_send_params";
pub const SEND_TUNED_BF16_ANY: &str = "_ZN10switchyard5impls18expert_send_kernelINS0_12AnswerConfigILj7168ELb0ELj448ELj14EEEEEv21sy_expert_send_params";
pub const SEND_FP8_ANY: &str = "_ZN10switchyard5impls18expert_send_kernelINS0_12AnswerConfigILj0ELb1ELj256ELj14EEEEEv21sy_expert_send_params";
pub const SEND_BF16_ANY: &str = "_ZN10switchyard5impls18expert_send_kernelINS0_12AnswerConfigILj0ELb0ELj256ELj14EEEEEv21sy_expert_send_params";
pub const ECHO_TUNED_FP8_ANY: &str = "_ZN10switchyard5impls11echo_kernelINS0_12AnswerConfigILj7168ELb1ELj448ELj14EEEEEv14sy_echo_params";
pub const ECHO_TUNED_BF16_ANY: &str = "_ZN10switchyard5impls11echo_kernelINS0_12AnswerConfigILj7168ELb0ELj448ELj14EEEEEv14sy_echo_params";
pub const ECHO_FP8_ANY: &str = "_ZN10switchyard5impls11echo_kernelINS0_12AnswerConfigILj0ELb1ELj256ELj14EEEEEv14sy_echo_params";
pub const ECHO_BF16_ANY: &str = "_ZN10switchyard5impls11echo_kernelINS0_12AnswerConfigILj0ELb0ELj256ELj14EEEEEv14sy_echo_params";
