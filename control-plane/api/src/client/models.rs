//! Requests about the editions of the model, and about one of them.

use reqwest::Method;

use super::ControlClient;
use crate::error::ControlError;
use crate::models::{AddModelRequest, ClientsReport, EditionList, SwitchRequest};
use crate::types::ModelDigests;

/// The placement that a client follows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlacementQuery {
    /// Fingerprint of the model. `None` asks for the current model.
    pub fingerprint: Option<String>,
    /// True for a watch that makes no calls. It does not keep an old model in service.
    pub is_observer: bool,
}

impl PlacementQuery {
    /// `path` with this query behind it.
    pub(super) fn on(&self, path: &str) -> String {
        let fingerprint = self.fingerprint.iter().map(|text| format!("fingerprint={text}"));
        let observer = self.is_observer.then(|| "observer=true".to_owned());
        let parts: Vec<String> = fingerprint.chain(observer).collect();
        match parts.is_empty() {
            true => path.to_owned(),
            false => format!("{path}?{}", parts.join("&")),
        }
    }
}

impl ControlClient {
    /// The models that the fleet serves, the current one first.
    ///
    /// # Errors
    /// [`ControlError`].
    pub async fn models(&self) -> Result<EditionList, ControlError> {
        self.call(Method::GET, "v1/models", None::<&()>).await
    }

    /// Accepts servers of another model, beside the current one. Changes nothing if they are accepted already.
    ///
    /// # Errors
    /// [`ControlError`]. Its code is [`code::MODEL_UPDATE`](crate::code::MODEL_UPDATE) if the update under way does not
    /// allow it.
    pub async fn add_model(&self, request: &AddModelRequest) -> Result<EditionList, ControlError> {
        self.call(Method::POST, "v1/models", Some(request)).await
    }

    /// Makes the next model the current one: clients that start from then on get it.
    ///
    /// # Errors
    /// As for [`add_model`](Self::add_model).
    pub async fn switch_model(&self, request: &SwitchRequest) -> Result<EditionList, ControlError> {
        self.call(Method::POST, "v1/models/switch", Some(request)).await
    }

    /// Ends an update before its switch: the servers of the next model are drained.
    ///
    /// # Errors
    /// As for [`add_model`](Self::add_model).
    pub async fn abort_model_update(&self) -> Result<EditionList, ControlError> {
        self.call::<(), _>(Method::POST, "v1/models/abort", None).await
    }

    /// Reports the clients of a control plane that follows, and returns the editions.
    ///
    /// # Errors
    /// [`ControlError`].
    pub async fn report_clients(
        &self,
        report: &ClientsReport,
    ) -> Result<EditionList, ControlError> {
        self.call(Method::POST, "v1/models/clients", Some(report)).await
    }

    /// The digests of the tensors of one model, if a member has sent them.
    ///
    /// # Errors
    /// [`ControlError`].
    pub async fn model_digests_of(&self, fingerprint: &str) -> Result<ModelDigests, ControlError> {
        let path = format!("v1/model/digests?fingerprint={fingerprint}");
        self.call(Method::GET, &path, None::<&()>).await
    }
}
