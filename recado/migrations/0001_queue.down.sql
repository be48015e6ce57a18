DROP TABLE {schema}.job_stats;
DROP TABLE {schema}.queues;
DROP TABLE {schema}.workers;
DROP TABLE {schema}.job_errors;
DROP TABLE {schema}.jobs;
