//! The features that the workspace is built with.
//!
//! Every step builds the whole workspace with the same features, or with more. For a single package cargo chooses
//! other features of its dependencies, and compiles all of them once more.

use crate::tools;

/// Headers of libibverbs and librdmacm, which the feature `verbs` needs, by Debian package.
pub const VERBS_HEADERS: [(&str, &str); 2] = [
    ("libibverbs-dev", "/usr/include/infiniband/verbs.h"),
    ("librdmacm-dev", "/usr/include/rdma/rdma_cma.h"),
];
/// The feature `verbs` of every package that has it.
const VERBS: [&str; 4] = [
    "switchyard-cli/verbs",
    "switchyard-verbs/rdma",
    "switchyard-bench-harness/verbs",
    "switchyard-tests/verbs",
];
/// The feature `cuda` of every package that has it.
const CUDA: [&str; 9] = [
    "switchyard-cli/cuda",
    "switchyard-attention-client/cuda",
    "switchyard-bench-harness/cuda",
    "switchyard-cuda-ipc/cuda",
    "switchyard-expert-server/cuda",
    "switchyard-kernels/cuda",
    "switchyard-proxy/cuda",
    "switchyard-python/cuda",
    "switchyard-tests/cuda",
];

/// Beside the default features: RDMA where its headers are.
pub fn all() -> String {
    verbs().join(",")
}

/// As [`all`], with the kernels embedded. Building needs the CUDA toolkit.
pub fn with_cuda() -> String {
    [verbs(), &CUDA].concat().join(",")
}

/// As [`all`], with the kernels embedded and nothing else for GPUs.
pub fn with_kernels() -> String {
    [verbs(), &["switchyard-kernels/cuda"]].concat().join(",")
}

/// The features of the GPU bundle: without RDMA, whose library would have to be on every GPU host.
pub fn of_bundle() -> String {
    CUDA.join(",")
}

fn verbs() -> &'static [&'static str] {
    if can_build_verbs() { &VERBS } else { &[] }
}

/// Whether the headers are here that the feature `verbs` needs.
pub fn can_build_verbs() -> bool {
    VERBS_HEADERS.iter().all(|(_, header)| tools::is_here(header))
}
