//! `tunnel-server bundle`.

use clap::Args;
use tunnel_core::bundle::{BundleArgs, write};

use super::doctor::DoctorFlags;

#[derive(Args, Clone, Debug)]
pub struct BundleCommand {
    #[command(flatten)]
    bundle: BundleArgs,
    #[command(flatten)]
    flags: DoctorFlags,
}

impl BundleCommand {
    /// Writes the file and prints what is in it.
    ///
    /// # Errors
    /// A bad flag, or the file cannot be written.
    pub async fn run(&self) -> anyhow::Result<()> {
        let (report, running) = self.flags.examine().await?;
        let state_dir = self.flags.state_dir(&running);
        let units = "postern-server@*";
        let pods = "in a cluster: `kubectl -n kube-system logs POD`";
        write(&self.bundle, &report, running.as_ref().map_err(String::as_str), &state_dir, (units, pods))
            .await?;
        Ok(())
    }
}
