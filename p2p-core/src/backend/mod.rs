//! Transports.
//!
//! | backend | peers | puts |
//! |---|---|---|
//! | [`local`] | two ends in one process | stores |
//! |

pub mod local;
pub mod mapped;
