//! The transport over a software NIC.
/// A software NIC as a network of the handshake.
#[derive(Debug)]
pub struct SoftNetwork;
