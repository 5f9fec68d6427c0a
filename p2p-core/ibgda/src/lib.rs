//! GPU-initiated RDMA on mlx5: whether this host can do it, and exactly what is missing.
//!
//! **Not yet run on a ConnectX.** Nothing is linked: the vendor's libraries are opened at run time, and a
//! host without them gets a line in the report. The steps from here to a queue that a kernel posts on are
//! in `docs/ibgda.md`.
//!
//! | module | what it holds |
//! |---|---|
//! | [`mod@probe`] | devices, drivers, modules, driver options, libraries: one check each |
//! | [`library`] | libibverbs and libmlx5, opened at run time |
//! | [`device`] | devices as libibverbs lists them, and which are mlx5 |

pub mod device;
pub mod library;
pub mod probe;

pub use device::{Device, DeviceError, devices};
pub use library::{Libraries, LibraryError};
pub use probe::{Check, Report, State, probe};
